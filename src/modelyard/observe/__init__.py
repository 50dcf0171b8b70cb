"""What operators see: metrics, logs with redaction; every name in one place."""
