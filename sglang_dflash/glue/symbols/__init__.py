"""Everything in SGLang that we use: the only folder that names its modules.

One table per subject. An attribute that we read from an object, such as `batch.seq_lens`, is in the
entry of its class, so that a release that renames it is caught at start-up, not in a step.
"""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol
from sglang_dflash.glue.symbols import cpu, models, server, step

SYMBOLS: dict[str, Symbol] = {**server.SYMBOLS, **step.SYMBOLS, **models.SYMBOLS, **cpu.SYMBOLS}
