"""Server-lifetime parts: the drafter, the target's heads, verify pass and weight updates."""
