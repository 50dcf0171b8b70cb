"""What routing gains: traces replayed in virtual time beside other routers' rules; ``python -m bench.routing``."""
