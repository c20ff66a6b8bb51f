"""Tokens from logits: argmax, Gumbel-max, top-k and top-p, block verification."""
