"""Verify attention, and the index of prefixes it reads."""
