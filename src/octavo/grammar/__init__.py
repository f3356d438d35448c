"""Structured output: what a request asks for as a grammar, and matchers that say which tokens may come next. No torch.

`source` turns a request's wish into grammar text and refuses what cannot be done, with the path in the schema; `compiler` turns grammar
text into matchers over a model's vocabulary. The grammar engine itself, llguidance, is an optional package.
"""
