"""The scale claims: a fleet of thousands of endpoints in virtual time, against its baselines."""
