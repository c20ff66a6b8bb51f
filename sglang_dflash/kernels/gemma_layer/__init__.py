"""A Gemma-4 layer's verify pass: its thin GEMMs and the fused ops between them."""
