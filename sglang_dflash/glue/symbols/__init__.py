"""Everything in SGLang that we use: the only folder that names its modules.

Each table holds one subject. What we read through an object, `batch.seq_lens`, is an attribute in
the entry of its class, so that a release that renames it is found at the start, not in a step.
"""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol
from sglang_dflash.glue.symbols import cpu, models, server, step

SYMBOLS: dict[str, Symbol] = {**server.SYMBOLS, **step.SYMBOLS, **models.SYMBOLS, **cpu.SYMBOLS}
