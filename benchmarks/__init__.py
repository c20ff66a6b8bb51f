"""Whatever makes a number: from the root of the repository, `python -m benchmarks.serving` etc."""
