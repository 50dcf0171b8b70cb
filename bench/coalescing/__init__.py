"""What holding tokens for some milliseconds saves; ``python -m bench.coalescing``."""
