"""Sampling parameters of a batch: a sampling plan, per-row logit adjustments, or a refusal."""
