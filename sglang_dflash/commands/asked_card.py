"""The card that a plan is for: one that was named, or the one of this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from sglang_dflash.commands.card_names import CARDS, FRACTION, SLIDING_SHARE
from sglang_dflash.commands.card_plan import limits_of, released, sliding_share
from sglang_dflash.commands.memory_plan import GIB
from sglang_dflash.kernels import cards


@dataclass(frozen=True)
class AskedCard:
    """A card to plan for."""

    gib: float | None  # None: no GPU here, and none was asked about
    capability: tuple[int, int]
    title: str  # empty if it has no name
    is_known: bool  # whether the capability is the card's own

    @classmethod
    def of(cls, options: argparse.Namespace) -> AskedCard:
        """Read --card and --gpu-memory-gb. A card has no more memory than it is sold with, of which
        its driver takes some."""
        asked = options.gpu_memory_gb
        if options.card is not None:
            card = CARDS[options.card]
            gib = card.gib if asked is None else min(asked, card.gib)
            return cls(gib, card.capability, card.title, is_known=True)
        has_gpu = torch.cuda.is_available()
        if asked is None and has_gpu:
            asked = torch.cuda.get_device_properties(0).total_memory / GIB
        return cls(asked, cards.current().capability, "", is_known=has_gpu)

    def __str__(self) -> str:
        major, minor = self.capability
        parts = [self.title] if self.title else []
        parts += [] if self.gib is None else [f"{self.gib:g} GiB"]
        return ", ".join([*parts, f"compute capability {major}.{minor}"])

    def complete(self, options: argparse.Namespace) -> argparse.Namespace:
        """Return the options with what was left open filled in: for a card that was named, by its
        size and its pair."""
        pair = released(options.model_path)
        fraction, share = FRACTION, SLIDING_SHARE
        if self.title and self.gib is not None:
            large = FRACTION if pair is None else pair[0].fraction_80gb
            limits = limits_of(self.gib, fraction_80gb=large)
            fraction = limits.fraction
            share = share if pair is None else sliding_share(pair[0], limits)
        filled = dict(vars(options))
        if filled["mem_fraction_static"] is None:
            filled["mem_fraction_static"] = fraction
        if filled["swa_full_tokens_ratio"] is None:
            filled["swa_full_tokens_ratio"] = share
        return argparse.Namespace(**filled)

    def arguments(self, options: argparse.Namespace) -> list[str]:
        """Return further arguments of a server on a card that was named."""
        if not self.title or self.gib is None:
            return []
        pair = released(options.model_path)
        own = () if pair is None or options.quantization else pair[1].arguments
        return [*limits_of(self.gib).bounds(), *own]
