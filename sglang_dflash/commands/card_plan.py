"""What to serve on a card: the released pairs that fit it, with settings for its size.

Every number comes from the memory plan (`memory_plan.py`), applied to `released_pairs.py`. None was
measured on the card.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.commands.card_names import FRACTION
from sglang_dflash.commands.memory_plan import GIB, RankMemory
from sglang_dflash.config import DrafterSpec
from sglang_dflash.draft_backends import Place, choose_draft_backend
from sglang_dflash.glue.startup.drafter_format import read_config
from sglang_dflash.kernels.cards import Card
from sglang_dflash.released_pairs import PAIRS, Pair, Weights

# one request of 32K, or four of 8K
WANTED_TOKENS = 32768
CONTEXT_STEP = 8192  # contexts are rounded down to multiples of it
LEAST_CHUNK = 2048  # of a prompt, where SGLang chooses
LARGE_GIB = 60  # from here on, the recipes for 80 and 141 GB apply


@dataclass(frozen=True)
class Limits:
    """Settings for a size of card. What they leave outside weights and KV is for CUDA graphs,
    activations and CUDA itself; fewer requests and shorter chunks need less of it."""

    fraction: float  # of the card, for weights and KV
    requests: int | None = None  # None: SGLang's own choice
    chunk: int | None = None  # of a prompt
    sliding_share: float = 1.0  # at most

    def bounds(self) -> list[str]:
        """Return a server's arguments for what is bounded."""
        found: list[str] = []
        if self.requests is not None:
            found += ["--max-running-requests", str(self.requests)]
        if self.chunk is not None:
            found += ["--chunked-prefill-size", str(self.chunk)]
        return found


def limits_of(gib: float, *, fraction_80gb: float = FRACTION) -> Limits:
    """Return the settings for a card with this much memory."""
    if gib < 28:
        return Limits(0.88, requests=4, chunk=2048, sliding_share=0.15)
    if gib < 40:
        return Limits(0.9, requests=4, chunk=2048, sliding_share=0.15)
    if gib < LARGE_GIB:
        return Limits(0.9, requests=16, chunk=4096)
    # as launch/serve.sh and the recipes have it
    return Limits(fraction_80gb if gib < 100 else FRACTION)


@dataclass(frozen=True)
class Offer:
    """A pair as it fits a card."""

    pair: Pair
    form: Weights
    memory: RankMemory
    limits: Limits
    gib: float
    kv_dtype: str
    draft_backend: str
    block_size: int

    @property
    def tokens(self) -> int:
        return self.memory.tokens(self.gib, self.limits.fraction)

    @property
    def kv_name(self) -> str:
        return "bf16" if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def context(self) -> int:
        """The longest request, in tokens."""
        most = _text(self.pair)["max_position_embeddings"]
        return min(most, self.tokens // CONTEXT_STEP * CONTEXT_STEP)

    @property
    def serves(self) -> bool:
        """Whether the KV holds WANTED_TOKENS, and the pool of sliding-window layers a window and a
        chunk of a prompt."""
        window = _text(self.pair).get("sliding_window")
        if window is None:
            return self.tokens >= WANTED_TOKENS
        pool = self.memory.sliding_share * self.tokens
        return self.tokens >= WANTED_TOKENS and pool >= window + (self.limits.chunk or LEAST_CHUNK)

    @property
    def recipe(self) -> str | None:
        """The script that serves so."""
        if self.gib >= LARGE_GIB:
            return f"launch/{self.pair.recipe}.sh" if self.form is self.pair.forms[0] else None
        small = self.form.small_recipe
        if small is None or self.kv_dtype != small.kv_dtype:
            return None
        return (
            f"launch/{small.script}" if 0.9 * small.size_gb <= self.gib <= small.size_gb else None
        )

    def arguments(self) -> list[str]:
        """Return the server's arguments."""
        found = ["--model-path", self.form.target]
        found += ["--speculative-algorithm", "DFLASH"]
        found += ["--speculative-draft-model-path", self.pair.drafter]
        found += ["--speculative-num-draft-tokens", str(self.block_size)]
        found += ["--attention-backend", "triton"]
        found += ["--mem-fraction-static", f"{self.limits.fraction:g}"]
        found += ["--swa-full-tokens-ratio", f"{self.memory.sliding_share:g}"]
        found += [*self.limits.bounds(), "--context-length", str(self.context)]
        if self.kv_dtype != "auto":
            found += ["--kv-cache-dtype", self.kv_dtype]
        return [*found, *self.form.arguments]

    def launch(self) -> str:
        """Return the command that serves so."""
        words = ["python", "-m", "sglang.launch_server", *self.arguments()]
        line = shlex.join(words)
        return with_plain_towers(line, self.form) if self.form.has_listed_towers else line

    def summary(self) -> dict[str, Any]:
        """Return what the offer is, as names and values to print."""
        assert self.memory.weights is not None
        return {
            "pair": f"{self.form.target} + {self.pair.drafter}",
            "weights": f"{self.form.kind}, {self.memory.weights / GIB:.1f} GiB with the drafter",
            "KV cache": self.kv_name,
            "KV tokens": self.tokens,
            "context": self.context,
        }

    def described(self) -> dict[str, Any]:
        """Return the offer with how to serve it, as names and values to print."""
        return self.summary() | {
            "memory fraction": self.limits.fraction,
            "draft attention": self.draft_backend,
            "recipe": self.recipe,
            "launch": self.launch(),
        }


def with_plain_towers(line: str, form: Weights) -> str:
    """Return a command in which a shell replaces the target by a folder that SGLang can load."""
    folder = f'"$(python -m sglang_dflash plain-towers {form.target})"'
    return line.replace(f"--model-path {form.target} ", f"--model-path {folder} ")


def sliding_share(pair: Pair, limits: Limits) -> float:
    """Return the size of the pool of sliding-window layers on a card, as a share of the other's."""
    has_windows = "sliding_window" in _text(pair)
    return min(pair.sliding_share, limits.sliding_share) if has_windows else pair.sliding_share


def _text(pair: Pair) -> Mapping[str, Any]:
    return pair.config.get("text_config", pair.config)


def offers(
    gib: float, capability: tuple[int, int], *, fraction: float | None = None
) -> list[Offer]:
    """Return the best form of each pair that fits a card, in order of preference; `fraction`: of
    the memory, in place of what suits the card.

    The best is the most exact form with room enough. A KV cache in FP8 is for cards where no form
    has room otherwise: answers then differ from plain decoding's by more than near-ties.
    """
    best = []
    for pair in PAIRS:
        forms = _forms(pair, gib, capability, fraction)
        best += [offer for offer in forms if offer.serves][:1]
    return best


def _forms(
    pair: Pair, gib: float, capability: tuple[int, int], fraction: float | None
) -> Iterator[Offer]:
    card, place = Card(capability), Place("cuda", capability, is_fp32=False)
    limits = limits_of(gib, fraction_80gb=pair.fraction_80gb)
    limits = limits if fraction is None else replace(limits, fraction=fraction)
    for dtype in ("auto", "fp8_e4m3") if card.has_e4m3 else ("auto",):
        for form in pair.forms:
            if form.capability > capability:
                continue
            memory, drafter = count(pair.recipe, form.target)
            backend = choose_draft_backend(drafter, place, asked=None)
            share = sliding_share(pair, limits)
            yield Offer(
                pair=pair,
                form=form,
                memory=replace(memory.with_kv(dtype, backend), sliding_share=share),
                limits=limits,
                gib=gib,
                kv_dtype=dtype,
                draft_backend=backend,
                block_size=drafter.block_size,
            )


@functools.cache
def count(recipe: str, target: str) -> tuple[RankMemory, DrafterSpec]:
    """Return the memory plan of a released pair on one card, with KV in bf16, and its drafter."""
    pair = next(pair for pair in PAIRS if pair.recipe == recipe)
    form = next(form for form in pair.forms if form.target == target)
    asked = argparse.Namespace(
        tp_size=1,
        quantization=None,
        trust_remote_code=False,
        swa_full_tokens_ratio=pair.sliding_share,
        kv_cache_dtype=None,
        speculative_draft_kv_cache_dtype=None,
        speculative_draft_model_quantization=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = (
            _write(Path(folder) / "target", {**pair.config, **form.config}),
            _write(Path(folder) / "drafter", pair.draft_config),
        )
        target_config, draft_config = (read_config(path, trust_remote_code=False) for path in paths)
        drafter = DrafterSpec.from_config(draft_config.to_dict(), name=pair.drafter)
        memory = RankMemory.of_pair(
            target_config, draft_config, drafter=drafter, paths=paths, asked=asked
        )
    assert memory.weights is not None, f"{target}: the config does not tell its size"
    return memory, drafter


def _write(folder: Path, config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def released(target: str) -> tuple[Pair, Weights] | None:
    """Return the pair whose target has this name; None for any other target."""
    found = ((pair, form) for pair in PAIRS for form in pair.forms if form.target == target)
    return next(found, None)
