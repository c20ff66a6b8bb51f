"""Verify attention, and the prefix index it reads."""
