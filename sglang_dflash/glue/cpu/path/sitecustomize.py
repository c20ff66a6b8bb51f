"""Python imports the first sitecustomize on its path at start-up; PYTHONPATH comes first."""

import sglang_dflash_cpu  # noqa: F401
