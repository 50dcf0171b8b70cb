"""What durable metering costs, against SQLite and a bare ``write()`` in the same run; ``python -m bench.journal``."""
