"""Benchmarks. Run from the root of the repository: `python -m benchmarks.serving` etc."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
