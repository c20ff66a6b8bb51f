"""SGLang's own programs, as our commands run them."""
