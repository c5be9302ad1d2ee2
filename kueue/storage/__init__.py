"""Durable storage of the queue."""
