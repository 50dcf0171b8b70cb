"""``modelyard bench`` beside the load generator in C."""
