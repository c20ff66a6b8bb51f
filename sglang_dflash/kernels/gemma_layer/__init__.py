"""A Gemma-4 layer's verify pass, between and in its products."""
