"""The operations bundle: what keeps a lab's servers and workers running without anybody looking."""
