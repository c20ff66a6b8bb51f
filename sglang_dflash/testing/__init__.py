"""Servers on this machine, started, asked and stopped by the demo, the tests and the benchmarks."""
