"""Everything in SGLang that we use: the only folder that names its modules.

One table per subject, and one per served release for what the others lack or have in another form.
An attribute that we read from an object, such as `batch.seq_lens`, is in the entry of its class, so
that a release that renames it is caught at start-up, not in a step.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

from sglang_dflash.glue.contract import Symbol
from sglang_dflash.glue.symbols import cpu, models, server, sglang_0_5_17, sglang_0_5_23, step

COMMON: dict[str, Symbol] = {**server.SYMBOLS, **step.SYMBOLS, **models.SYMBOLS, **cpu.SYMBOLS}
RELEASES: dict[str, ModuleType] = {"0.5.17": sglang_0_5_17, "0.5.23": sglang_0_5_23}


def of(version: str) -> dict[str, Symbol]:
    """Return the contract with a served release."""
    table = RELEASES[version]
    assert not COMMON.keys() & table.SYMBOLS.keys(), "an entry is common, or of some releases"
    found = {**COMMON, **table.SYMBOLS}
    for name, attributes in table.ALSO.items():
        whole = (*found[name].attributes, *attributes)
        found[name] = dataclasses.replace(found[name], attributes=whole)
    return found
