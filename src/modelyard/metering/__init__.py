"""From a request to a bill: journal, delivery into the ledger, prices."""
