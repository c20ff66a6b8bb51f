"""SGLang's memory plan includes the draft KV and the second block of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.startup import memory
from sglang_dflash.glue.startup.server_args import read_drafter
from tests.tiny_models import make_drafter


def server_args(**changes: Any) -> Any:
    settings = {
        "speculative_algorithm": "DFLASH",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "max_speculative_num_draft_tokens": 16,
        "page_size": 1,
    }
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize("page_size", [1, 16])
def test_slot_table_rows_hold_the_two_blocks_a_step_reserves(page_size: int) -> None:
    """Without the headroom, a request near the context length writes into its neighbour's row."""
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
    from sglang.srt.runtime_context import get_context

    asked = {
        "speculative_algorithm": "DFLASH",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 16,
        "page_size": page_size,
    }
    with get_context().override_server_args(**asked) as args:
        # releases differ in whether they pass the arguments
        given = (args,) * len(compat.SYMBOLS["row_headroom"].takes or ())
        headroom = get_req_to_token_extra_context_len(*given)
    context_len = 1000
    furthest = -(-(context_len + 32) // page_size) * page_size
    assert context_len + headroom >= furthest


def test_headroom_of_other_algorithms_is_left_alone() -> None:
    args = server_args(speculative_algorithm="EAGLE")
    assert memory.row_headroom(lambda _args: 20, args) == 20


def kv_cache_config(algorithm: str, draft_path: Any) -> Any:
    """The input of SGLang's pool configurators for a hybrid target of 2 full + 4 sliding layers."""
    model_config = SimpleNamespace(
        full_attention_layer_ids=[2, 5],
        swa_attention_layer_ids=[0, 1, 3, 4],
        head_dim=64,
        v_head_dim=64,
        swa_head_dim=32,
        swa_v_head_dim=32,
        get_num_kv_heads=lambda tp: 1,
        get_swa_num_kv_heads=lambda tp: 2,
        hf_config=SimpleNamespace(architectures=["Gemma4ForCausalLM"]),
    )
    args = server_args(
        swa_full_tokens_ratio=0.5,
        speculative_draft_model_path=draft_path,
        speculative_draft_model_revision=None,
        speculative_draft_attention_backend="fa4",
        trust_remote_code=False,
        json_model_override_args="{}",
    )
    return SimpleNamespace(
        spec_algorithm=compat.SpeculativeAlgorithm.from_string(algorithm),
        is_draft_worker=False,
        kv_cache_dtype_str="auto",
        kv_cache_dtype=torch.bfloat16,
        model_dtype=torch.bfloat16,
        model_config=model_config,
        server_args=args,
        sliding_window_size=47,
        page_size=1,
        spec_aux_config=SimpleNamespace(dflash_draft_num_layers=2, eagle_draft_num_layers=None),
    )


budgeted_by_us = pytest.mark.skipif(
    "swa_pool_init" not in compat.SYMBOLS, reason="this SGLang budgets the draft KV itself"
)


@pytest.mark.skipif("swa_pool_init" in compat.SYMBOLS, reason="this SGLang needs our budget")
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("heads", [(4, 2), (6, 3)], ids=["shared", "whole"])
def test_sglangs_own_budget_is_ours_byte_for_byte(
    tmp_path: Path, tp_size: int, heads: tuple[int, int]
) -> None:
    """It reads the drafter's geometry from the config, too; a difference would be lost memory, or
    more than there is."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.dflash_utils import dflash_draft_cell_size_per_token

    made = make_drafter(tmp_path, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    asked = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(made)}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        with get_context().override_server_args(**asked):
            found = dflash_draft_cell_size_per_token(
                draft_model_config=ModelConfig(model_path=str(made), is_draft_model=True),
                draft_num_layers=2,
                draft_kv_cache_dtype=dtype,
                tp_size=tp_size,
            )
            drafter = read_drafter(seams.settings())
        assert found == drafter.kv_bytes_per_token(element_size=dtype.itemsize, tp_size=tp_size)
        each = 1 if heads == (4, 2) and tp_size == 2 else heads[1]
        assert found == 2 * 2 * each * 32 * dtype.itemsize


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.model_executor.pool_configurator as configurators

    rank = SimpleNamespace(attn_tp_size=1)
    monkeypatch.setattr(configurators, "get_parallel", lambda: rank)
    monkeypatch.setitem(compat.__dict__, "get_parallel", lambda: rank)


@budgeted_by_us
def test_hybrid_target_budgets_the_draft_kv_byte_for_byte(models: Any, single_rank: None) -> None:
    """SGLang 0.5.17 ignores the drafter here, and the pool exceeds its memory budget."""
    from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

    with_drafter = HybridSWAPoolConfigurator(kv_cache_config("DFLASH", str(models / "drafter")))
    plain = HybridSWAPoolConfigurator(kv_cache_config("NONE", None))
    layers, kv_heads, head_dim, element = 2, 2, 32, 2
    assert with_drafter._cell_size - plain._cell_size == layers * 2 * kv_heads * head_dim * element


@budgeted_by_us
def test_fa4_draft_keeps_model_dtype_beside_an_fp8_target(models: Any, single_rank: None) -> None:
    kvc = kv_cache_config("DFLASH", str(models / "drafter"))
    kvc.kv_cache_dtype = torch.float8_e4m3fn
    assert memory.draft_kv_bytes(kvc) == 2 * 2 * 2 * 32 * 2
    kvc.server_args.speculative_draft_attention_backend = "triton"
    assert memory.draft_kv_bytes(kvc) == 2 * 2 * 2 * 32
