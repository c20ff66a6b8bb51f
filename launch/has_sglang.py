"""Exit with a message unless this Python has the packages a server needs. Runs in any Python 3.

A script, not `python -m`: this package must be installed, not just in the current folder.
"""

import importlib.util
import sys

NEEDED = ("torch", "sglang", "sglang_dflash")
absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if absent:
    sys.exit(
        "{} has no {}. Install what is missing (README.md, 'Serve on a GPU' or 'Try it'), or set "
        "PYTHON to one that has it.".format(sys.executable, " and no ".join(absent))
    )
