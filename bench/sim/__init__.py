"""The request level of the simulator: how close it is to a real engine, and what it shows; ``python -m bench.sim``."""
