"""How fast usage goes from the journal to Kafka, and how fast the books are compared."""
