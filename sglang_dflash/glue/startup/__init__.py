"""Before anything is loaded: arguments, refusals, memory, and what a target must deliver."""
