"""From a gateway's journal to the ledger: how fast, how large, and whether it is the same to the token."""
