"""What a batch does to requests in real time, and what kill -9 does to a batch."""
