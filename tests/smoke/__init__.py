"""The smoke test: `python -m tests.smoke.run`."""

from sglang_dflash.interrupt import end_imports_on_interrupt

end_imports_on_interrupt()
