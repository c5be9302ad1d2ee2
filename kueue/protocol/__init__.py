"""The messages, and their framing."""
