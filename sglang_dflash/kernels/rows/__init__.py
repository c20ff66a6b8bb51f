"""Sharing the rows of a step among its requests."""
