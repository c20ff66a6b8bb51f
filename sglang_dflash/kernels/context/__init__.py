"""Feature injection: draft KV from target features."""
