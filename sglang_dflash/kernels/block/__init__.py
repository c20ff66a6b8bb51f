"""Block building."""
