"""The program `kueue_server`: everything around the pure engine."""
