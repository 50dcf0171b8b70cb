"""How long questions to a ledger of 100 million requests take; ``python -m bench.usage``."""
