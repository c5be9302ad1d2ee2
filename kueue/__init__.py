"""kueue: a durable, user-level job queue for laboratories."""

__version__ = "0.1.0"
