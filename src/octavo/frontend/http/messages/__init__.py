"""The Messages API (Anthropic's shape) in front of the chat path."""
