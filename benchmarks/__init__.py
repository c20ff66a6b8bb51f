"""Benchmarks. Run from the root of the repository: `python -m benchmarks.serving` etc."""

from pathlib import Path

from sglang_dflash.interrupt import end_imports_on_interrupt

end_imports_on_interrupt()
ROOT = Path(__file__).resolve().parent.parent
