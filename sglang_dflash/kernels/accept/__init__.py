"""Acceptance of drafts."""
