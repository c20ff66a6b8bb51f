"""SGLang's own programs, run by our commands."""
