"""The Responses API: its items and events in front of the chat path."""
