"""What is still served when three times too much is asked; ``python -m bench.overload``."""
