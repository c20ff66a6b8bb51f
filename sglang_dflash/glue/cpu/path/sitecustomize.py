"""Python imports a module of this name at its start, from PYTHONPATH before any other."""

import sglang_dflash_cpu  # noqa: F401
