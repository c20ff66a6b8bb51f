"""As long as the server: the drafter, the target's heads, its verify pass and its weights."""
