"""How long commands and the platform take to start, against bare Python in the same run; ``python -m bench.start``."""
