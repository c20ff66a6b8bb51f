"""Local servers for the demo, the tests and the benchmarks: start, query, stop."""
