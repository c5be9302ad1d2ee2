"""The `kueue` command: one module for each group of verbs."""
