"""Very many open streams at once, none lost; ``python -m bench.streams``."""
