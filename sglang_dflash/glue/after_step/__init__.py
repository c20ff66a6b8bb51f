"""After a step: requests that end, and everything that is counted and shown."""
