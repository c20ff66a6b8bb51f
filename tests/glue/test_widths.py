"""Verify passes of any width: their graphs, how a width is chosen, and the server's defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import release, seams
from sglang_dflash.glue.models.verify_backend import (
    SMALL_INDEX,
    VerifyBackend,
    shrink_graph_buffers,
)
from sglang_dflash.glue.startup import width_args
from sglang_dflash.glue.startup.width_args import why_full_blocks, why_one_width
from sglang_dflash.glue.step.batch_host import BatchHost
from sglang_dflash.glue.step.graph_outputs import DraftGraphs
from sglang_dflash.glue.step.verify_graphs import (
    VerifyGraphRunner,
    VerifyRows,
    install_verify_graphs,
)
from sglang_dflash.kernels import TORCH
from tests.glue.test_attention import make_backend
from tests.glue.test_server_args import alter, parse

ON_GPU = ("--device", "cuda", "--attention-backend", "triton")
H200_MIB = 143_771


def graph_runner(**changes: Any) -> Any:
    """Return a runner of graphs for 1, 2 and 4 blocks of 16, without a GPU. 40 requests may run,
    and the index has room for 1000 keys."""
    runner = object.__new__(VerifyGraphRunner)
    settings = {
        "model_runner": SimpleNamespace(req_to_token_pool=SimpleNamespace(size=40)),
        "attn_backend": SimpleNamespace(cuda_graph_kv_indices=torch.zeros(1000)),
        "captured_req_width": 16,
        "capture_bs": [1, 2, 4],
        "capture_num_tokens": [16, 32, 64],
        # what SGLang's initialiser would set
        "ragged_verify_mode": False,
        "max_bs": 4,
        "max_num_token": 4,
        **changes,
    }
    for name, value in settings.items():
        setattr(runner, name, value)
    return runner


def test_graphs_are_keyed_by_rows_whatever_sglang_computes() -> None:
    runner = graph_runner()
    assert runner.ragged_verify_mode
    # requests of one row each, and the rows of the largest graph
    assert (runner.max_bs, runner.max_num_token) == (40, 64)
    assert runner._build_ragged_verify_token_buckets() == [16, 32, 64]
    assert runner._capture_graph_size(bs=2, num_tokens=32) == 32
    # a graph is captured for as many requests as it has rows, of which full blocks are used
    assert [runner._ragged_capture_slots(rows) for rows in (16, 32, 64)] == [16, 32, 40]
    assert runner._capture_ragged_verify_layout(32) == VerifyRows(32, requests=2, width=16)
    runner.buffers = "buffers"
    assert runner._autotune_buffers() == ("buffers", 4)


def test_a_runner_takes_these_graphs_for_every_planned_pass() -> None:
    target = SimpleNamespace()
    install_verify_graphs(target)
    assert target._decode_cuda_graph_runner_cls() is VerifyGraphRunner
    rows = VerifyRows(16, requests=5, width=3)
    batch: Any = SimpleNamespace(batch_size=5)
    assert graph_runner()._can_run_ragged_verify_graph(batch, rows)
    assert rows.used == 15
    graph_runner()._stage_ragged_verify_layout(rows, 16)


@pytest.mark.parametrize(
    ("requests", "width", "keys", "graph"),
    [
        pytest.param(1, 1, 10, 16, id="one row"),
        pytest.param(1, 16, 10, 16, id="exactly a block"),
        pytest.param(17, 1, 10, 32, id="more requests than rows of the first"),
        pytest.param(8, 4, 10, 32, id="exactly two blocks"),
        pytest.param(11, 3, 10, 64, id="33 rows"),
        pytest.param(40, 1, 10, 64, id="all requests"),
        pytest.param(13, 5, 10, None, id="65 rows"),
        pytest.param(1, 16, 960, 16, id="as many keys as the index holds beside padding"),
        pytest.param(1, 16, 961, None, id="one more"),
    ],
)
def test_rows_run_in_the_smallest_graph_that_holds_them(
    requests: int, width: int, keys: int, graph: int | None
) -> None:
    """Without the limits a pass would write past the graph's buffers, or past the index."""
    assert graph_runner().graph_for(requests * width, keys) == graph


def test_a_graph_can_be_filled_for_timing() -> None:
    laid_out: list[Any] = []
    runner = graph_runner(
        attn_backend=SimpleNamespace(
            _update_target_verify_buffers=seams.as_buffer_filler(lambda *a: laid_out.append(a))
        ),
        buffers=SimpleNamespace(seq_lens=torch.ones(40), req_pool_indices=torch.zeros(40)),
    )
    runner.lay_out(32, requests=2, width=16)
    [(slots, seq_lens, request_rows, spec_input)] = laid_out
    assert (slots, len(seq_lens), len(request_rows)) == (32, 32, 32)
    assert spec_input.ragged_verify_layout == VerifyRows(32, requests=2, width=16)
    assert spec_input.draft_token_num == 16


@pytest.mark.parametrize(
    ("context_len", "keys"),
    # any 256 requests fit; then as many keys as are small beside a model; then full blocks
    [(4096, 256 * 4096), (65_536, SMALL_INDEX), (262_144, 80 * 262_144)],
)
def test_the_index_has_room_for_more_requests_than_full_blocks(context_len: int, keys: int) -> None:
    def as_sglang_does(_max_bs: int, max_num_tokens: int) -> None:
        index = torch.zeros(max_num_tokens * context_len, dtype=torch.int64, device="meta")
        backend.cuda_graph_kv_indices = index

    backend = SimpleNamespace(
        device="meta",
        max_context_len=context_len,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        init_cuda_graph_state=as_sglang_does,
    )
    shrink_graph_buffers(backend, 16)
    backend.init_cuda_graph_state(256, 1280)
    assert backend.cuda_graph_kv_indices.shape == (keys,)
    assert backend.cuda_graph_kv_indices.dtype == torch.int64


def laid_out_prefixes(layout: VerifyRows | None, *, width: int, **settings: Any) -> Any:
    """Lay out four requests, of which the last two only pad a graph: two with prefixes of 2 and 3
    tokens in rows 1 and 3 of the slot table, then two with one token in row 0."""
    backend = make_backend(
        qo_indptr=torch.full((7,), 99, dtype=torch.int32),
        kv_indptr=torch.full((7,), 99, dtype=torch.int32),
        cuda_graph_kv_indices=torch.full((20,), 99),
        window_kv_indptr=torch.full((7,), 99, dtype=torch.int32),
        cuda_graph_window_kv_indices=torch.full((20,), 99),
        cuda_graph_window_kv_offsets=torch.full((6,), 99),
        req_to_token=torch.tensor([[0, 0, 0], [10, 11, 0], [70, 71, 72], [30, 31, 32]]),
        **settings,
    )
    spec_input: Any = SimpleNamespace(draft_token_num=width, ragged_verify_layout=layout)
    VerifyBackend(backend, TORCH, attention=None).lay_out_prefixes(
        4, torch.tensor([2, 3, 1, 1, 50]), torch.tensor([1, 3, 0, 0, 2]), spec_input
    )
    return backend


@pytest.mark.parametrize(
    ("width", "bounds"),
    [(1, [0, 1, 2, 2, 2]), (3, [0, 3, 6, 6, 6]), (16, [0, 16, 32, 32, 32])],
)
def test_requests_that_pad_a_graph_have_no_rows(width: int, bounds: list[int]) -> None:
    """Otherwise rows of padding would be taken for theirs, and write KV to slots in use."""
    backend = laid_out_prefixes(VerifyRows(32, requests=2, width=width), width=width)
    assert backend.qo_indptr.tolist() == [*bounds, 99, 99]
    assert backend.kv_indptr.tolist() == [0, 2, 5, 6, 7, 99, 99]
    assert backend.cuda_graph_kv_indices[:8].tolist() == [10, 11, 30, 31, 32, 0, 0, 99]


def test_shared_rows_begin_where_the_device_says() -> None:
    rows = VerifyRows(32, requests=2, width=16, bounds=torch.tensor([0, 19, 32]))
    backend = laid_out_prefixes(rows, width=16)
    assert backend.qo_indptr.tolist() == [0, 19, 32, 32, 32, 99, 99]
    assert backend.kv_indptr.tolist() == [0, 2, 5, 6, 7, 99, 99]


def test_in_graphs_of_full_blocks_every_request_has_rows() -> None:
    backend = laid_out_prefixes(None, width=16)
    assert backend.qo_indptr.tolist() == [0, 16, 32, 48, 64, 99, 99]


def test_windows_are_laid_out_for_padded_requests_too() -> None:
    rows = VerifyRows(32, requests=2, width=3)
    backend = laid_out_prefixes(rows, width=3, sliding_window_size=2)
    assert backend.qo_indptr.tolist() == [0, 3, 6, 6, 6, 99, 99]
    assert backend.window_kv_indptr.tolist() == [0, 2, 4, 5, 6, 99, 99]
    assert backend.cuda_graph_window_kv_indices[:7].tolist() == [10, 11, 31, 32, 0, 0, 99]
    assert backend.cuda_graph_window_kv_offsets[:4].tolist() == [0, 1, 0, 0]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sizes graphs by the memory of a GPU."""
    name = "get_device_memory_capacity"
    users = [m for m in list(sys.modules.values()) if m.__name__.startswith("sglang.srt.")]
    for module in users:
        if name in vars(module):
            monkeypatch.setattr(module, name, lambda _device: H200_MIB)


@pytest.fixture
def is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tiny target's steps take the GPU as long as those of a large one."""
    monkeypatch.setattr(width_args, "SMALL_HIDDEN_SIZE", 0)


@pytest.mark.usefixtures("h200", "is_large")
def test_where_widths_adapt_as_many_requests_run_as_in_plain_decoding(models: Path) -> None:
    """Graphs still hold few blocks: under load, a step verifies fewer drafts of each request."""
    args = parse(models, *ON_GPU)
    assert args.max_running_requests == 256
    graphs = args.cuda_graph_config.decode
    assert (graphs.max_bs, max(graphs.bs), min(graphs.bs)) == (80, 80, 1)


@pytest.mark.usefixtures("h200")
def test_graphs_of_a_small_target_hold_more_blocks(models: Path) -> None:
    graphs = parse(models, *ON_GPU).cuda_graph_config.decode
    assert (graphs.max_bs, max(graphs.bs), min(graphs.bs)) == (128, 128, 1)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("extra", "variables"),
    [
        pytest.param([], {"SGLANG_DFLASH_WIDTH": "4"}, id="fixed"),
        pytest.param([], {"SGLANG_DFLASH_WIDTH": "16"}, id="full blocks"),
        pytest.param([], {"SGLANG_SIMULATE_ACC_LEN": "3"}, id="simulated"),
        pytest.param(["--attention-backend", "fa3"], {}, id="fa3"),
        pytest.param(["--decode-attention-backend", "fa3"], {}, id="fa3 for decoding"),
        pytest.param(["--disable-cuda-graph-padding"], {}, id="no padding"),
    ],
)
def test_otherwise_48_requests_run_and_the_graphs_are_sglangs(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    variables: dict[str, str],
) -> None:
    """Every request takes a full block: more of them would run without a graph."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = parse(models, *ON_GPU, "--speculative-draft-attention-backend", "triton", *extra)
    assert args.max_running_requests == 48
    assert args.cuda_graph_config.decode.max_bs == 256


def test_on_a_cpu_widths_adapt_without_graphs(models: Path) -> None:
    args = parse(models)
    assert args.max_running_requests == 48
    assert why_one_width(args) is None


@pytest.mark.usefixtures("h200", "is_large")
@pytest.mark.parametrize(
    ("extra", "running", "blocks"),
    [
        (["--max-running-requests", "400"], 400, 80),
        (["--cuda-graph-max-bs-decode", "96"], 96, 96),
        (["--cuda-graph-max-bs-decode", "16"], 48, 16),
        (["--cuda-graph-bs-decode", "1", "64"], 64, 64),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else str(given),
)
def test_what_the_user_asks_for_is_kept(
    models: Path, extra: list[str], running: int, blocks: int
) -> None:
    args = parse(models, *ON_GPU, *extra)
    graphs = args.cuda_graph_config.decode
    assert (args.max_running_requests, graphs.max_bs, max(graphs.bs)) == (running, blocks, blocks)


@pytest.mark.usefixtures("h200", "is_large")
def test_no_more_requests_run_than_the_user_asks_for(models: Path) -> None:
    """Newer releases capture no graphs for more than that, either."""
    args = parse(models, *ON_GPU, "--max-running-requests", "10")
    graphs = args.cuda_graph_config.decode
    assert args.max_running_requests == 10
    blocks = 80 if release.installed() == "0.5.17" else 10
    assert (graphs.max_bs, max(graphs.bs)) == (blocks, blocks)


@pytest.mark.parametrize("value", ["0", "17", "x", "-1", "2.5", ""])
def test_a_width_that_is_none_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", value)
    expected = (
        f"^SGLANG_DFLASH_WIDTH={value} is neither auto, uniform nor a number of tokens from 1 .no "
        "drafts. to the block size 16. Set one of these, or unset it.$"
    )
    with pytest.raises(ValueError, match=expected):
        parse(models)


@pytest.mark.parametrize("value", ["auto", "uniform", "1", "16"])
def test_every_width_of_a_block_is_taken(
    models: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", value)
    reason = None if value in ("auto", "uniform") else f"SGLANG_DFLASH_WIDTH={value}"
    assert why_one_width(parse(models)) == reason


def test_a_width_without_graphs_for_it_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run without graphs, several times as slowly as with full blocks."""
    on_fa3 = (*ON_GPU, "--attention-backend", "fa3")
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", "4")
    parse(models, *ON_GPU)
    message = "SGLANG_DFLASH_WIDTH=4 needs verify passes of any width.*--attention-backend fa3"
    with pytest.raises(ValueError, match=message):
        parse(models, *on_fa3)
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", "16")
    parse(models, *on_fa3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"device": "cpu", "attention_backend": "torch_native"}, None, id="cpu"),
        pytest.param(
            {"attention_backend": "fa3"},
            "--attention-backend fa3 verifies full blocks; triton takes any width",
            id="fa3",
        ),
        pytest.param(
            {"enable_deterministic_inference": True},
            "--enable-deterministic-inference has its own attention kernel",
            id="deterministic",
        ),
        pytest.param(
            {"disable_cuda_graph_padding": True}, "--disable-cuda-graph-padding", id="padding"
        ),
        pytest.param(
            {"enable_two_batch_overlap": True},
            "--enable-two-batch-overlap splits full blocks",
            id="two batches",
        ),
        pytest.param({"enable_lora": True}, "LoRA graphs are sized by full blocks", id="lora"),
    ],
)
def test_full_blocks_have_a_reason(
    models: Path, changes: dict[str, Any], reason: str | None
) -> None:
    """The reason is shown in /server_info and the log: nobody has to guess why widths stay."""
    args = parse(models, *ON_GPU)
    alter(args, **changes)
    assert why_full_blocks(args) == reason


def test_positions_of_several_parts_keep_full_blocks(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse(models, *ON_GPU)
    real = seams.model_config(args)
    found = SimpleNamespace(model_is_mrope=True, hf_config=real.hf_config)
    monkeypatch.setattr(seams, "model_config", lambda _args: found)
    assert why_full_blocks(args) == "the model's positions have several parts (mrope)"


@pytest.mark.parametrize(
    ("requests", "width", "early"),
    [(2, 16, True), (2, 1, True), (2, 4, False), (9, 16, False), (9, 1, True)],
)
def test_a_verify_pass_is_planned_early_only_if_drafting_leaves_its_inputs(
    requests: int, width: int, early: bool
) -> None:
    """The graphs of both models share their inputs: a draft pass over other rows would leave its
    own slots there, and the target's KV would be written to them."""
    host = object.__new__(BatchHost)
    host.verify_batches = []
    graphs = object.__new__(DraftGraphs)
    graphs._largest = 8
    host._runtime = SimpleNamespace(config=SimpleNamespace(block_size=16), draft_graphs=graphs)
    block: Any = SimpleNamespace(token_ids=torch.zeros(requests, width))
    assert host._can_plan_early(block) is early
