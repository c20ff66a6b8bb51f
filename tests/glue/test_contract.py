"""What we take from SGLang exists in the installed release, as we use it, and is used."""

from __future__ import annotations

import pytest

from sglang_dflash.glue import compat, release
from sglang_dflash.testing.server import ROOT


def test_installed_release_keeps_the_contract() -> None:
    assert release.installed() == release.supported() == "0.5.17"
    assert compat.broken() == []


def test_contract_lists_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Symbol("srt.speculative.spec_info", "SpeculativeAlgorithm.create_workers")
    lost = compat.Symbol("srt.layers.layernorm", "RMSNorm", ("epsilon_of_old",))
    moved = compat.Symbol("srt.no_such_module", "Thing")
    monkeypatch.setattr(compat, "SYMBOLS", {"a": gone, "b": lost, "c": moved})
    lines = compat.broken()
    assert len(lines) == 3
    assert (
        "a: sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_workers is gone"
        in (lines[0])
    )
    assert lines[1] == "b: sglang.srt.layers.layernorm.RMSNorm lost epsilon_of_old"
    assert "c: sglang.srt.no_such_module.Thing is gone" in lines[2]


def test_contract_lists_attributes_that_were_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by getattr with a default, a new name would mean wrong slots in silence."""
    pool = compat.Symbol(
        "srt.mem_cache.swa_memory_pool",
        "SWAKVPool",
        # assigned, a method, neither
        attributes=("full_to_swa_index_mapping", "register_mapping", "full_to_window_mapping"),
    )
    inherited = compat.Symbol(
        "srt.layers.vocab_parallel_embedding",
        "ParallelLMHead",
        attributes=("shard_indices", "weight_loader", "shards"),
    )
    monkeypatch.setattr(compat, "SYMBOLS", {"a": pool, "b": inherited})
    assert compat.broken() == [
        "a: sglang.srt.mem_cache.swa_memory_pool.SWAKVPool lost full_to_window_mapping",
        "b: sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead lost shards",
    ]


def test_every_symbol_of_the_contract_is_used() -> None:
    """A symbol that nobody uses would pin SGLang for no reason."""
    text = "".join(
        path.read_text()
        for path in (ROOT / "sglang_dflash" / "glue").rglob("*.py")
        if path.name != "compat.py"
    )
    called_through_objects = {
        "target_forward",
        "prepare_for_verify",
        "maybe_evict_swa",
        "evict_swa",
        "Sampler_forward",
        "SamplingBatchInfo",
        "ServerArgs",
        "resolved_backends",
        "triton_forward_extend",
        "triton_verify_buffers",
        "triton_graph_state",
        "flash_plan_in_graph",
        "gemma4_layer",
        "get_logits",
        "compute_lm_head",
        "ShardIndices",
        "update_disk",
        "update_tensor",
        "update_distributed",
        "update_ipc",
        "is_fully_idle",
        "flush_cache",
        "process_batch_result",
        "filter_batch",
        "fuse_scale",
    }
    unused = [
        name
        for name in compat.SYMBOLS
        if f"compat.{name}" not in text
        and f'"{name}"' not in text
        and name not in called_through_objects
    ]
    assert unused == []


def test_unknown_symbol_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="compat knows no SGLang symbol 'nonsense'"):
        _ = compat.nonsense
