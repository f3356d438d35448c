"""Text in and out of tokens: tokenizers, chat templates, incremental detokenization, stop strings. No torch, no transformers."""
