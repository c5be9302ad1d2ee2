"""The engine: decides what becomes of jobs, touches nothing."""
