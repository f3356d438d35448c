"""Reads a model's reply while it is written: reasoning, tool calls, text.

One incremental parser a format serves streams and whole replies alike. The rule that all of them keep: however the text is cut into
pieces, the joined events are the same.
"""
