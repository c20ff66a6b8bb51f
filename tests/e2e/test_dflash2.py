"""DFlash2 drafters in both formats: exact output, and the oracle's drafts block for block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.pairs import tiny_drafter, tiny_target
from sglang_dflash.reference import Drafter, generate, generate_plain
from sglang_dflash.reference.model import SLIDING
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import SCRIPTED, SHAPE, assert_drafted

NEW_TOKENS = 40
# shorter than in training
BLOCK = 7
SETTINGS = DFlash2(conv_taps=3, conv_group_size=16, selector_rank=16, selector_top_k=8)
# the speculators format has none of these
TRANSFORMS = {"output_multiplier": 0.9, "logit_cap": 30.0}


def make_dflash2_drafter(folder: Path, settings: DFlash2) -> Path:
    """Write the tiny pair's drafter with convolutions and a selector that do little, so that it
    still drafts well, but not as before, and with non-causal windows."""
    torch.manual_seed(0)
    plain = Drafter.from_pretrained(tiny_drafter())
    kinds = (SLIDING,) * plain.config.num_hidden_layers
    changes = {"layer_types": kinds, "sliding_window": 64, "causal_windows": False}
    drafter = Drafter(replace(plain.config, dflash2=settings, **changes)).requires_grad_(False)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    for name, parameter in drafter.named_parameters():
        if name.endswith("base_kernel"):
            parameter += 0.02 * torch.randn_like(parameter)
        elif name.endswith("kernel_projection.weight"):
            parameter.normal_(std=0.002)
        elif "selector" in name:
            parameter.normal_(std=0.2)
    drafter.save_pretrained(folder)
    return folder


def translate(folder: Path) -> None:
    """Rewrite a config in the speculators format."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    dflash = config.pop("dflash_config")
    size = config.pop("block_size")
    others = ("architectures", "num_target_layers", "dtype")
    found = {
        "speculators_model_type": "dflash2",
        "architectures": config["architectures"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash.pop("target_layer_ids")],
        "block_size": size,
        "draft_vocab_size": config["vocab_size"],
        **dflash,
        "transformer_layer_config": {k: v for k, v in config.items() if k not in others},
    }
    path.write_text(json.dumps(found))


def learn_mask(folder: Path, target: PreTrainedModel) -> None:
    """Write a learned embedding of the mask token, near the target's."""
    token = json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"]
    row = target.get_input_embeddings().weight[token].detach()
    row = row + 0.3 * row.std() * torch.randn_like(row)
    torch.save({"mask_token_id": token, "embedding": row}, folder / "mask_embedding.pt")


class Pair:
    def __init__(self, kind: str, folder: Path, prompts: list[list[int]]) -> None:
        self.folder, self.prompts = folder, prompts
        is_speculators = kind == "speculators"
        settings = SETTINGS if is_speculators else replace(SETTINGS, **TRANSFORMS)
        drafter = make_dflash2_drafter(folder / "drafter", settings)
        self.target = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32)
        if is_speculators:
            translate(drafter)
        else:
            learn_mask(drafter, self.target)
        self.drafter = Drafter.from_pretrained(drafter)
        self.server = Server(
            *SHAPE,
            *("--speculative-num-draft-tokens", str(BLOCK)),
            *("--speculative-draft-model-path", str(drafter)),
            env={
                "PYTHONPATH": SCRIPTED,
                "SCRIPT_FOLDER": str(folder),
                "SGLANG_DFLASH_WIDTH": str(BLOCK),
            },
        )


@pytest.fixture(scope="module", params=["released", "speculators"])
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> Iterator[Pair]:
    found = Pair(request.param, tmp_path_factory.mktemp("pair"), [prompts[1], prompts[3]])
    with found.server:
        yield found


def test_drafts_and_output_equal_the_oracle(pair: Pair) -> None:
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    rids = [f"record-{i}" for i in range(len(pair.prompts))]
    served = pair.server.generate_all(pair.prompts, rids=rids, **params)
    lengths = []
    for rid, prompt, answer in zip(rids, pair.prompts, served, strict=True):
        plain = generate_plain(pair.target, prompt, max_new_tokens=NEW_TOKENS)
        oracle = generate(
            pair.target, pair.drafter, prompt, max_new_tokens=NEW_TOKENS, block_size=BLOCK
        )
        assert answer["output_ids"] == oracle.token_ids == plain
        assert_drafted(pair.folder, rid, oracle)
        lengths += oracle.commit_lens
    # drafts are kept and rejected
    assert 1 in lengths and max(lengths) > 3


def test_sampled_drafts_are_accepted(pair: Pair) -> None:
    """Which tokens are then committed is tested in tests/glue/test_selector_head.py."""
    before = pair.server.acceptance()["accepted_tokens"]
    found = pair.server.generate_all(
        pair.prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0
    )
    assert [len(answer["output_ids"]) for answer in found] == [NEW_TOKENS] * 2
    assert pair.server.acceptance()["accepted_tokens"] - before > 10
