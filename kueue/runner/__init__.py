"""The owner of the job processes: a program of its own that outlives the worker. Standard library only."""
