"""What guests cost a gateway: ``python -m bench.seats``."""
