"""Targets with linear attention: states of a request move with what it has committed.

tests/e2e/test_families.py compares their answers one step after the other. Here steps overlap, the
prefix cache keeps snapshots of states, and requests are retracted.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.glue import seams
from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, start_together
from tests.schedules import follows
from tests.tiny_configs import VOCAB
from tests.tiny_models import make_drafter, make_target

pytestmark = pytest.mark.skipif(
    not seams.chooses_snapshots, reason="refused with this release of SGLang"
)

FAMILY = "qwen3.5"
NEW_TOKENS = 90
PROMPT_LENS = (20, 70, 150, 65)
# the fewest tokens between snapshots
INTERVAL = 64
SHAPE = ("--skip-tokenizer-init", "--chunked-prefill-size", "64", "--max-total-tokens", "4096")
# as in tests/e2e/test_pool.py: requests are retracted every seventh step, if several run
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


class Hybrid:
    """A target with and without speculation, and plain decoding's answers."""

    def __init__(self, folder: Path) -> None:
        target = make_target(FAMILY, folder / "target")
        drafter = make_drafter(folder / "drafter")
        chance = random.Random(6)
        self.prompts = [[chance.randrange(3, VOCAB) for _ in range(n)] for n in PROMPT_LENS]
        self._folder = folder
        # seeds are honoured in deterministic mode only
        common = (*SHAPE, "--model-path", str(target), "--enable-deterministic-inference")
        common += ("--mamba-track-interval", str(INTERVAL), "--max-mamba-cache-size", "128")
        script = {"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(folder)}
        self.plain, self.dflash = start_together(
            Server(*common, plain=True),
            Server(
                *common,
                "--speculative-draft-model-path",
                str(drafter),
                env={**script, **SCHEDULES["plan stream"], **RETRACT},
            ),
        )
        assert follows(self.dflash, "plan stream")
        self.answers = self.decode(self.prompts)

    def decode(self, prompts: list[list[int]], **params: Any) -> list[list[int]]:
        """Return plain decoding's answers, and let the scripted drafter know them."""
        found = self.plain.generate_all(
            prompts, **{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **params}
        )
        answers = [answer["output_ids"] for answer in found]
        known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        (self._folder / "answers.json").write_text(json.dumps(known))
        return answers

    def ask(self, kind: str, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
        """Send prompts at once, with a scripted drafter."""
        return self.dflash.generate_all(
            prompts,
            rids=[f"{kind}-{i}" for i in range(len(prompts))],
            **{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **params},
        )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    hybrid = Hybrid(tmp_path_factory.mktemp("hybrid"))
    yield hybrid
    hybrid.plain.stop()
    hybrid.dflash.stop()


def test_full_blocks_are_verified_and_the_server_says_why(hybrid: Hybrid) -> None:
    """Nothing was asked for, so the width would adapt on another target."""
    width = hybrid.dflash.state()["sglang_dflash"]["width"]
    assert width["fixed_because"] == "linear attention verifies full blocks"
    assert width["mode"] == 16


@pytest.mark.parametrize("kind", ["right4", "right15"])
def test_retracted_requests_answer_alike(hybrid: Hybrid, kind: str) -> None:
    begin = len(hybrid.dflash.log())
    # none is retracted if they happen to run one after another, as on a busy machine
    for _ in range(10):
        found = [answer["output_ids"] for answer in hybrid.ask(kind, hybrid.prompts)]
        assert found == hybrid.answers
        if re.search(r"#retracted_reqs: [1-9]", hybrid.dflash.log()[begin:]):
            return
    pytest.fail("no request was retracted")


def test_seeded_sampling_answers_alike(hybrid: Hybrid) -> None:
    params = {"temperature": 1.0, "sampling_seed": 5, "top_k": 20}
    answers = hybrid.decode(hybrid.prompts[:2], **params)
    assert answers != hybrid.answers[:2]
    found = hybrid.ask("right6", hybrid.prompts[:2], **params)
    assert [answer["output_ids"] for answer in found] == answers


def test_a_prefix_starts_from_the_state_that_a_block_has_left(hybrid: Hybrid) -> None:
    """The prompt's last snapshot is at 64 tokens. A later one was made by a block that passed the
    next multiple: with any other row's state the answer would differ."""
    hybrid.dflash.flush_cache()
    hybrid.decode(hybrid.prompts)
    [first] = hybrid.ask("right4", hybrid.prompts[1:2])
    longer = hybrid.prompts[1] + first["output_ids"][:-10] + hybrid.prompts[0]
    [expected] = hybrid.decode([longer], max_new_tokens=30)
    [found] = hybrid.ask("right15", [longer], max_new_tokens=30)
    assert found["output_ids"] == expected
    assert found["meta_info"]["cached_tokens"] == 2 * INTERVAL
