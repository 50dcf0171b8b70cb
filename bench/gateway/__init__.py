"""What a gateway costs in front of an engine, side by side with nginx in one run; ``python -m bench.gateway``."""
