"""What a cold start of a real model takes, and what the weight cache and a warm pool spare of it."""
