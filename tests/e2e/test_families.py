"""Random targets of other families: exact output, and drafting from the family's own features.

The embedded pair of the other tests covers Llama. Answers are compared with transformers, because
SGLang's plain decoding on a GPU deviates from the model: its Triton backend reads one key fewer
than a sliding window holds, while its prefill and our verify read all of them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_dflash.glue import seams
from sglang_dflash.reference import Drafter, generate, generate_plain
from sglang_dflash.testing.server import Server
from tests.e2e.conftest import FULL_BLOCKS, SCRIPTED, assert_drafted, start_together
from tests.tiny_configs import QUANTISED, VOCAB
from tests.tiny_models import load_target, make_drafter, make_gpt_oss_drafter, make_target

NEW_TOKENS = 64
LONG = 420  # tokens, of which 48 fit into a sliding window
PROMPT_LENS = (3, 20, 70, 150, 9, 64, 65, 33)


class Family:
    """A target with and without speculation, its drafter, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.target = make_target(name, folder / "target")
        # released drafters name their tensors with or without the prefix
        self.drafter = (
            make_gpt_oss_drafter(folder / "drafter")
            if name == "gpt-oss"
            else make_drafter(folder / "drafter", prefix="model." if name == "qwen3" else "")
        )
        chance = random.Random(5)
        self.prompts = [
            [chance.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS
        ]
        self.model = load_target(name, self.target)
        self.answers = [
            generate_plain(self.model, prompt, max_new_tokens=NEW_TOKENS) for prompt in self.prompts
        ]
        sequences = [p + a for p, a in zip(self.prompts, self.answers, strict=True)]
        (folder / "answers.json").write_text(json.dumps(sequences))
        window = getattr(self.model.config, "sliding_window", None)
        # the longest prompt for which plain decoding matches the model
        self.longest = max(PROMPT_LENS)
        plain_target = self.target
        if window and torch.cuda.is_available():
            plain_target, self.longest = self._widen(), window
        common = ("--skip-tokenizer-init", "--chunked-prefill-size", "64")
        common += ("--max-total-tokens", "4096")
        if name in HYBRID:
            # by default, recurrent states take most of the memory
            common += ("--max-mamba-cache-size", "64")
        if name == "gpt-oss" and torch.cuda.is_available():
            # experts in plain torch, which read sizes on the host
            common += ("--disable-cuda-graph", "--moe-runner-backend", "triton")
        # SGLang compiles its choice of DeepSeek's experts, which takes longer than all tests
        env = {"TORCHDYNAMO_DISABLE": "1"} if name == "deepseek" else {}
        self.plain, self.dflash = start_together(
            Server(*common, "--model-path", str(plain_target), plain=True, env=env),
            Server(
                *common,
                # an answer of LONG tokens takes 27 steps if all drafts are accepted
                *("--decode-log-interval", "4"),
                "--model-path",
                str(self.target),
                "--speculative-draft-model-path",
                str(self.drafter),
                env={
                    **env,
                    "PYTHONPATH": SCRIPTED,
                    "SCRIPT_FOLDER": str(folder),
                    "BOTH_FEATURES": str(int(name != "granite" and not torch.cuda.is_available())),
                    **FULL_BLOCKS,
                },
            ),
        )

    def _widen(self) -> Path:
        """Return a copy with a window larger by one: plain decoding then reads the full window."""
        folder = self.folder / "wider"
        shutil.copytree(self.target, folder)
        config = json.loads((folder / "config.json").read_text())
        config["sliding_window"] += 1
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def ask(self, kind: str, indices: range) -> list[dict]:
        """Send several prompts at once, with a scripted drafter."""
        return self.dflash.generate_all(
            [self.prompts[i] for i in indices],
            rids=[f"{kind}-{i}" for i in indices],
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )


HYBRID = ("qwen3-next", "qwen3.5", "qwen3.5-vision", "qwen3.5-moe")
FAMILIES = ["qwen2", "qwen3", "qwen3-moe", "gemma4", "gemma4-moe", "gpt-oss", "granite"]
FAMILIES += ["deepseek", "minimax-m2", *HYBRID, *QUANTISED]
# much of which others cover: layers of Qwen3, experts, linear attention, and quantised weights
LONG_FAMILIES = ("qwen2", "qwen3-moe", "minimax-m2", "qwen3-next", "qwen3-awq")
LONG_FAMILIES += ("qwen3.5-vision", "qwen3.5-moe")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--families")
        chosen = asked.split(",") if asked else FAMILIES
        if unknown := set(chosen) - set(FAMILIES):
            raise pytest.UsageError(f"--families knows {FAMILIES}, not {sorted(unknown)}")
        params = [
            pytest.param(name, marks=pytest.mark.long) if name in LONG_FAMILIES else name
            for name in chosen
        ]
        metafunc.parametrize("family", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if request.param == "gemma4-moe" and torch.cuda.is_available():
        pytest.skip("SGLang's experts in torch read sizes on the host: not in a CUDA graph")
    if request.param in HYBRID and not seams.chooses_snapshots:
        pytest.skip("refused with this release of SGLang")
    if request.param in QUANTISED and torch.cuda.is_available():
        pytest.skip("SGLang's kernels for 4-bit weights are for half precision")
    family = Family(request.param, tmp_path_factory.mktemp(request.param))
    yield family
    family.plain.stop()
    family.dflash.stop()


@pytest.mark.parametrize("kind", ["real", "right1", "right4", "right15", "nan"])
def test_family_is_exact(family: Family, kind: str) -> None:
    """Eight concurrent requests, whatever is accepted."""
    found = [answer["output_ids"] for answer in family.ask(kind, range(8))]
    assert found == family.answers


def test_plain_decoding_answers_alike(family: Family) -> None:
    indices = [i for i, length in enumerate(PROMPT_LENS) if length <= family.longest]
    found = family.plain.generate_all(
        [family.prompts[i] for i in indices], max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    assert [answer["output_ids"] for answer in found] == [family.answers[i] for i in indices]


def test_layers_of_a_gemma_are_fused(family: Family) -> None:
    """The exactness tests above then cover the fused layers."""
    layers = family.dflash.state()["sglang_dflash"]["layers"]
    ops = family.dflash.state()["sglang_dflash"]["ops"]
    is_gemma = family.name.startswith("gemma4")
    assert layers == (f"sglang_dflash.{ops}" if is_gemma else "sglang")
    kernels = family.dflash.state()["sglang_dflash"]["kernels"]
    ours = "torch" if ops == "torch" else f"sglang_dflash.{ops}"
    kept = "sglang (the fused layer is for Gemma 4 only)"
    assert kernels["norm_add_norm"] == (ours if is_gemma else kept)
    if family.name == "gemma4-int4":
        assert kernels["thin_linear"] == "sglang (where weights are quantised)"


def test_drafter_reads_the_family_as_the_oracle_does(family: Family) -> None:
    """Feature layers, embedding scale and head, compared block for block with plain torch."""
    drafter = Drafter.from_pretrained(family.drafter, dtype=torch.float32).eval()
    # without a cache, the oracle is slow
    for i in range(1 if family.name in HYBRID else 3):
        [served] = family.ask("record", range(i, i + 1))
        oracle = generate(
            family.model,
            drafter,
            family.prompts[i],
            max_new_tokens=NEW_TOKENS,
            eos_token_ids=(),
            block_size=16,
        )
        assert served["output_ids"] == oracle.token_ids
        assert_drafted(family.folder, f"record-{i}", oracle)


def test_hooks_capture_what_the_target_itself_does(family: Family) -> None:
    """Granite's class has no method to capture features, so hooks serve it in all other tests."""
    file = family.folder / "features.txt"
    if family.name == "granite" or torch.cuda.is_available():
        assert not file.exists()
        return
    family.ask("real", range(2))
    assert set(file.read_text().splitlines()) == {"equal"}


def test_sliding_window_kv_is_evicted_while_decoding(family: Family) -> None:
    """Eviction follows tokens, not steps: no more is kept when every step commits a whole block.
    In-tree DFLASH keeps all of it until the request ends, and retracts early."""
    if family.name != "gemma4":
        pytest.skip("one family with sliding-window layers is enough")
    prompt = family.prompts[0]
    begin = len(family.dflash.log())
    answer = family.dflash.generate(prompt, max_new_tokens=LONG, ignore_eos=True)["output_ids"]
    assert sliding_window_tokens(family.dflash, begin) < 250
    sequences = json.loads((family.folder / "answers.json").read_text())
    (family.folder / "answers.json").write_text(json.dumps([prompt + answer, *sequences]))
    begin = len(family.dflash.log())
    found = family.dflash.generate(prompt, rid="right15-long", max_new_tokens=LONG, ignore_eos=True)
    assert found["output_ids"] == answer
    assert found["meta_info"]["spec_verify_ct"] < 40
    assert sliding_window_tokens(family.dflash, begin) < 250


def sliding_window_tokens(server: Server, begin: int) -> int:
    """Return the sliding-window KV tokens that a log shows late in a request of LONG tokens."""
    shown = re.findall(r"#full token: (\d+), .*#swa token: (\d+)", server.log()[begin:])
    # the extra step of overlap scheduling after the end of a request shows none
    return [int(windows) for full, windows in shown if int(full) > 320][-1]
