"""What the suites against real processes share: waiting, the yard, load, and the ledger check."""
