"""After a weight update of its target, a server answers like one started with the new weights."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.glue import seams
from sglang_dflash.pairs import tiny_target
from sglang_dflash.reference import generate_plain
from sglang_dflash.testing.server import Server, free_port
from tests.e2e.conftest import FULL_BLOCKS, SHAPE, start_together
from tests.tiny_models import load_target, make_drafter, make_target

# newer releases update from tensors and groups within a session, and choose the runners by name
HAS_SESSIONS = not seams.UPDATES
WITHOUT_DRAFTER = {"selector": "target"} if HAS_SESSIONS else {"disable_draft_model": True}
ANSWER = {"max_new_tokens": 32, "ignore_eos": True}
NORM = "model.norm.weight"


class Targets:
    """The tiny target and a second one, plain decoding's answers with each, and one server."""

    def __init__(self, folder: Path, plain: Server, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.first, self.second = tiny_target(), _perturbed(folder / "second")
        other, self.server = start_together(
            Server(*SHAPE, "--model-path", str(self.second), plain=True),
            Server(*SHAPE, env={"OVERLAP": "1", **FULL_BLOCKS}),
        )
        self.said = {
            self.first: _tokens(plain, prompts),
            self.second: _tokens(other, prompts),
        }
        other.stop()
        assert self.said[self.first] != self.said[self.second]

    def post(self, endpoint: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.server.url}/{endpoint}", json=body, timeout=120)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Open a session of updates within the context, with releases that ask for one."""
        if HAS_SESSIONS:
            assert self.post("begin_weight_update").ok
        yield
        if HAS_SESSIONS:
            assert self.post("end_weight_update").ok

    def load(self, target: Path, **options: Any) -> str:
        """Update from disk; return the server's message."""
        response = self.post("update_weights_from_disk", model_path=str(target), **options)
        assert response.ok, response.text
        return response.json()["message"]

    def expect(self, target: Path) -> None:
        assert _tokens(self.server, self.prompts) == self.said[target]


def _perturbed(folder: Path) -> Path:
    shutil.copytree(tiny_target(), folder)
    path = folder / "model.safetensors"
    chance = torch.Generator().manual_seed(3)
    tensors = {
        name: (tensor.float() * (1 + 0.3 * torch.randn(tensor.shape, generator=chance))).bfloat16()
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _tokens(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Ask together, and some alone: on a CPU, the GEMMs of a single block use packed weights."""
    answers = [server.generate(prompt, **ANSWER) for prompt in prompts[:2]]
    answers += server.generate_all(prompts, **ANSWER)
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def targets(
    plain: Server, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Targets]:
    found = Targets(tmp_path_factory.mktemp("targets"), plain, prompts[:6])
    yield found
    found.server.stop()


def test_from_disk_and_back(targets: Targets) -> None:
    targets.expect(targets.first)
    for target in (targets.second, targets.first):
        message = targets.load(target)
        assert "The drafter keeps its own" in message
        # a cached prefix would hold KV of the old weights
        answer = targets.server.generate(targets.prompts[0], **ANSWER)
        assert answer["meta_info"]["cached_tokens"] == 0
        targets.expect(target)


def _serialised(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return tensors as clients send them; they must stay alive until the server has read them."""
    from sglang.srt.utils import MultiprocessingSerializer

    return [MultiprocessingSerializer.serialize(list(tensors.items()), output_str=True)]


@pytest.fixture
def shared_by_name() -> Iterator[None]:
    """Share tensors by name: passing descriptors takes a key that only child processes have."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


@pytest.mark.usefixtures("shared_by_name")
@pytest.mark.parametrize("without_drafter", [False, True])
def test_from_tensor_and_back(targets: Targets, without_drafter: bool) -> None:
    targets.load(targets.first)
    targets.expect(targets.first)
    for target in (targets.second, targets.first):
        tensors = load_file(target / "model.safetensors")
        options = WITHOUT_DRAFTER if without_drafter else {}
        with targets.session():
            response = targets.post(
                "update_weights_from_tensor",
                serialized_named_tensors=_serialised(tensors),
                **options,
            )
        assert response.ok, response.text
        assert "The drafter keeps its own" in response.json()["message"]
        targets.expect(target)


def test_from_a_group_of_processes(targets: Targets) -> None:
    """The trainer process is rank 0, the server rank 1."""
    from sglang.srt.utils import init_custom_process_group

    targets.load(targets.first)
    targets.expect(targets.first)
    port, name = free_port(), "trainer"
    join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    answers: list[requests.Response] = []

    def ask(endpoint: str, **body: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(targets.post(endpoint, **body)))
        thread.start()
        return thread

    joining = ask("init_weights_update_group", group_name=name, backend="gloo", **join)
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=name
    )
    joining.join()
    tensors = load_file(targets.second / "model.safetensors")
    with targets.session():
        updating = ask(
            "update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=name,
        )
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=group)
        updating.join()
    assert [answer.ok for answer in answers] == [True, True], [a.text for a in answers]
    assert "The drafter keeps its own" in answers[1].json()["message"]
    targets.expect(targets.second)
    assert targets.post("destroy_weights_update_group", group_name=name).ok


def test_weights_are_read_from_the_target(targets: Targets) -> None:
    for target in (targets.second, targets.first):
        targets.load(target)
        found = targets.post("get_weights_by_name", name=NORM).json()
        expected = load_file(target / "model.safetensors")[NORM][:100]
        torch.testing.assert_close(torch.tensor(found), expected.float())


def test_requests_in_flight_keep_the_cache_or_the_weights(targets: Targets) -> None:
    """SGLang kills a server that cannot flush its cache after an update."""
    targets.load(targets.first)
    lines: list[str] = []
    begun = threading.Event()

    def ask() -> None:
        params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        body = {"input_ids": targets.prompts[0], "sampling_params": params, "stream": True}
        url = f"{targets.server.url}/generate"
        with requests.post(url, json=body, stream=True, timeout=300) as response:
            for line in response.iter_lines(decode_unicode=True):
                lines.append(line)
                begun.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(120)
    assert targets.post("pause_generation", mode="in_place").ok
    refused = targets.post("update_weights_from_disk", model_path=str(targets.second))
    assert refused.status_code == 400
    assert "Nothing was updated" in refused.json()["message"]
    message = targets.load(targets.second, flush_cache=False)
    assert "keep using KV of the old weights" in message
    assert targets.post("continue_generation").ok
    asking.join()
    last = [line for line in lines if line.startswith("data: {")][-1]
    answer = json.loads(last.removeprefix("data: "))
    assert answer["meta_info"]["completion_tokens"] == 400
    targets.server.flush_cache()
    targets.expect(targets.second)


@pytest.mark.usefixtures("shared_by_name")
def test_updates_that_fail_leave_the_server_alive(targets: Targets, tmp_path: Path) -> None:
    targets.load(targets.first)
    wrong = {NORM: torch.ones(7)}
    broken = tmp_path / "broken"
    shutil.copytree(targets.first, broken)
    save_file(wrong, broken / "model.safetensors", metadata={"format": "pt"})
    attempts = {
        "update_weights_from_disk": [
            {"model_path": str(tmp_path / "nowhere")},
            {"model_path": str(broken)},
            {"model_path": str(targets.second), "recapture_cuda_graph": True},
        ],
        "update_weights_from_tensor": [
            {"serialized_named_tensors": _serialised(wrong)},
            {"serialized_named_tensors": _serialised(wrong), **WITHOUT_DRAFTER},
            {"serialized_named_tensors": []},
            {"serialized_named_tensors": _serialised(wrong), "load_format": "unheard of"},
        ],
        "update_weights_from_ipc": [{"zmq_handles": {}}],
        "update_weights_from_distributed": [
            {"names": [NORM], "dtypes": ["float32"], "shapes": [[7]], "group_name": "unknown"}
        ],
        "init_weights_update_group": [
            {
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 2,
                "group_name": "",
            }
        ],
    }
    for endpoint, bodies in attempts.items():
        for body in bodies:
            with targets.session():
                response = targets.post(endpoint, **body)
            assert response.status_code == 400, (endpoint, body, response.text)
            assert response.json()["message"], (endpoint, body)
    targets.expect(targets.first)
    targets.load(targets.second)
    targets.expect(targets.second)


def test_the_weights_checker_leaves_the_drafter_alone(targets: Targets) -> None:
    """It resets weights to check that an update restores them, which none does for a drafter."""
    targets.load(targets.first)
    before = targets.server.generate(targets.prompts[0], **ANSWER)["meta_info"]
    for action in ("checksum", "snapshot", "compare", "reset_tensors", "nonsense"):
        response = targets.post("weights_checker", action=action)
        assert response.status_code in (200, 400), (action, response.text)
        assert response.json()["message"], action
    assert _tokens(targets.server, targets.prompts) != targets.said[targets.first]
    targets.load(targets.first)
    targets.expect(targets.first)
    after = targets.server.generate(targets.prompts[0], **ANSWER)["meta_info"]
    # a random drafter needs a step for nearly every token
    assert after["spec_verify_ct"] == before["spec_verify_ct"] < 0.75 * ANSWER["max_new_tokens"]


def test_memory_is_released_and_resumed_without_effect(targets: Targets) -> None:
    """As in SGLang without --enable-memory-saver, which DFLASH refuses."""
    targets.load(targets.first)
    assert targets.post("release_memory_occupation").ok
    assert targets.post("resume_memory_occupation").ok
    targets.expect(targets.first)


def test_a_router_follows_its_scale(tmp_path: Path, prompts: list[list[int]]) -> None:
    """SGLang folds the scale once into a norm, which the fused layers read."""
    first = make_target("gemma4-moe", tmp_path / "first")
    second = make_target("gemma4-moe", tmp_path / "second", seed=9)
    drafter = make_drafter(tmp_path / "drafter")
    model = load_target("gemma4-moe", second)
    args = ("--model-path", str(first), "--speculative-draft-model-path", str(drafter))
    with Server(*args, "--skip-tokenizer-init", "--max-total-tokens", "4096") as server:
        server.generate_all(prompts[:3], **ANSWER)
        response = requests.post(
            f"{server.url}/update_weights_from_disk", json={"model_path": str(second)}, timeout=120
        )
        assert response.ok, response.text
        answers = server.generate_all(prompts[:3], **ANSWER)
        assert [answer["output_ids"] for answer in answers] == [
            generate_plain(model, prompt, max_new_tokens=32) for prompt in prompts[:3]
        ]
