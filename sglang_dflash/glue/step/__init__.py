"""A prefill or decode step, from the scheduler's batch to the algorithm and back."""
