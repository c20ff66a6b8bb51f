"""Prefill and decode steps, from the scheduler's batch to the algorithm and back."""
