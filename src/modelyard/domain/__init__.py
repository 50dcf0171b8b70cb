"""The nouns: frozen values without I/O and without policy."""
