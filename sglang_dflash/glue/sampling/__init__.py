"""What the requests of a batch ask for: a plan, adjusted rows, or a refusal."""
