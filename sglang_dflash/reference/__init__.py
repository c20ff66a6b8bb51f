"""DFlash in plain torch and transformers: the oracle. It shares only the reading of configs."""

from sglang_dflash.reference.config import DrafterConfig
from sglang_dflash.reference.generate import Generation, generate, generate_plain
from sglang_dflash.reference.model import Drafter

__all__ = ["Drafter", "DrafterConfig", "Generation", "generate", "generate_plain"]
