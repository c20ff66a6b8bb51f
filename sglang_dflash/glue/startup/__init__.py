"""Before anything is loaded: arguments, refusals, memory sizing, and target feature capture."""
