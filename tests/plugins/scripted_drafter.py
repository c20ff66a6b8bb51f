"""A plug-in for tests: drafters whose acceptance is known by construction, and a recorder.

A request chooses by the prefix of its id:
    wrong-    every draft is wrong
    right<k>- the first k drafts of every block are right, the next one is wrong
    random-   drafts are drawn at random
    nan-      the drafter is fed NaN features
    inf-      the drafter is fed infinities
    raise-    the worker fails
    record-   the real drafter; blocks and draft KV are written to SCRIPT_FOLDER
Right drafts come from SCRIPT_FOLDER/answers.json: a list of full token sequences, prompt first.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

SCRIPTED = re.compile(r"(wrong|right|random|record)(\d*)-")
FOLDER = Path(os.environ.get("SCRIPT_FOLDER", "."))


def activate() -> None:
    from sglang_dflash.glue.step import batch_host

    real_draft = batch_host.BatchHost.draft_tokens
    real_write = batch_host.BatchHost.write_draft_kv

    def draft_tokens(self: Any, context: Any, masked: Any, randomness: Any, **options: Any) -> Any:
        output = real_draft(self, context, masked, randomness, **options)
        drafts = output.argmax_drafts
        vocab = self._runtime.config.drafter.vocab_size
        if any(req.rid.startswith("raise-") for req in self._batch.reqs):
            raise RuntimeError("scripted failure")
        for i, req in enumerate(self._batch.reqs):
            kind = SCRIPTED.match(req.rid)
            if kind is None:
                continue  # untouched, and without a device synchronisation
            start = int(context.lens[i])
            if kind[1] != "record":
                drafts[i] = drafts.new_tensor(script(kind, req, start, drafts.shape[1], vocab))
                output.sampled_drafts[i] = drafts[i]
            else:
                line = {"rid": req.rid, "start": start, "drafts": drafts[i].tolist()}
                with (FOLDER / "blocks.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return output

    def write_draft_kv(self: Any, features: Any, positions: Any, slots: Any) -> None:
        spoilt = [k for k in ("nan", "inf") for r in self._batch.reqs if r.rid.startswith(f"{k}-")]
        if spoilt:
            features = features.new_full(features.shape, float(spoilt[-1]))
            # not the real write: a verify graph has projected the correct features
            self._runtime.draft_cache.write(features, positions, slots)
        else:
            real_write(self, features, positions, slots)
        if self._batch.forward_mode.is_target_verify():
            for req in self._batch.reqs:
                if req.rid.startswith("record-"):
                    save_draft_kv(self, req, positions, slots)

    batch_host.BatchHost.draft_tokens = draft_tokens
    batch_host.BatchHost.write_draft_kv = write_draft_kv


def script(kind: re.Match[str], req: Any, start: int, width: int, vocab: int) -> list[int]:
    """Return the drafts of one request for the positions after `start`."""
    if kind[1] == "random":
        chance = random.Random(f"{req.rid} {start}")
        return [chance.randrange(vocab) for _ in range(width)]
    answer = answer_to(list(req.origin_input_ids))
    right = (answer[start + 1 :] + [0] * width)[:width]
    num_right = int(kind[2] or 0)
    return right[:num_right] + [(token + 1) % vocab for token in right[num_right:]]


def answer_to(prompt: list[int]) -> list[int]:
    for sequence in json.loads((FOLDER / "answers.json").read_text()):
        if sequence[: len(prompt)] == prompt:
            return sequence
    raise AssertionError(f"no answer for the prompt {prompt[:8]}... in answers.json")


def save_draft_kv(host: Any, req: Any, positions: Any, slots: Any) -> None:
    """Save the draft KV of everything committed so far; the last step of a request wins."""
    import torch

    from sglang_dflash.glue import seams

    # the request's committed rows: those that went to its own slots
    table = host.slot_table()[seams.row_of(req)].long()
    end = int(positions[(slots != 0) & (slots == table[positions])].max()) + 1
    table = table[:end]
    pool = host._runtime.draft_runner.token_to_kv_pool
    layers = range(host._runtime.config.drafter.num_layers)
    keys_values = [[buffer[table].clone() for buffer in pool.get_kv_buffer(i)] for i in layers]
    torch.save(keys_values, FOLDER / f"{req.rid}.pt")
