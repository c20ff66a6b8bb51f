"""Helpers shared by the ops on logits."""
