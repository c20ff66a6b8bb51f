"""DFlash in plain torch and transformers: the oracle. It shares only the list of config keys."""

from sglang_dflash.reference.generate import Generation, generate, generate_plain
from sglang_dflash.reference.model import Drafter, DrafterConfig

__all__ = ["Drafter", "DrafterConfig", "Generation", "generate", "generate_plain"]
