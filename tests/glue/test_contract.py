"""Everything we use of SGLang exists in the installed release, in the form we use."""

from __future__ import annotations

import pytest

from sglang_dflash.glue import compat, release
from sglang_dflash.glue.contract import Symbol


def test_installed_release_keeps_the_contract() -> None:
    assert release.installed() in release.SERVED
    assert compat.broken() == []


def test_contract_lists_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Symbol("srt.speculative.spec_info", "SpeculativeAlgorithm.create_workers")
    lost = Symbol("srt.layers.layernorm", "RMSNorm", ("epsilon_of_old",))
    moved = Symbol("srt.no_such_module", "Thing")
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
    """With getattr and a default, a renamed attribute would silently mean wrong slots."""
    pool = Symbol(
        "srt.mem_cache.swa_memory_pool",
        "SWAKVPool",
        # assigned, a method, neither
        attributes=("full_to_swa_index_mapping", "register_mapping", "full_to_window_mapping"),
    )
    inherited = Symbol(
        "srt.layers.vocab_parallel_embedding",
        "ParallelLMHead",
        attributes=("shard_indices", "weight_loader", "shards"),
    )
    monkeypatch.setattr(compat, "SYMBOLS", {"a": pool, "b": inherited})
    assert compat.broken() == [
        "a: sglang.srt.mem_cache.swa_memory_pool.SWAKVPool lost full_to_window_mapping",
        "b: sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead lost shards",
    ]


def test_contract_lists_parameters_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A positional parameter that moved would get another one's value."""
    module = "srt.layers.rotary_embedding.base"
    name = "RotaryEmbedding.forward_native"
    as_it_is = ("positions", "query", "key", "offsets", "fused_set_kv_buffer_arg")
    as_it_was = ("positions", "key", "query")
    symbols = {
        "a": Symbol(module, name, order=as_it_is[:3], takes=as_it_is),
        "b": Symbol(module, name, as_it_was, order=as_it_was),
        "c": Symbol(module, name, takes=as_it_is[:3]),
    }
    monkeypatch.setattr(compat, "SYMBOLS", symbols)
    assert compat.broken() == [
        f"b: sglang.{module}.{name} lost the order (positions, key, query): it has "
        "(positions, query, key)",
        f"c: sglang.{module}.{name} lost the parameters (positions, query, key): it has "
        "(positions, query, key, offsets, fused_set_kv_buffer_arg)",
    ]


def test_contract_lists_calls_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "srt.model_executor.runner.decode_cuda_graph_runner"
    kept = "capture_hook(self, out, forward_batch, num_tokens)"
    runner = Symbol(module, "DecodeCudaGraphRunner", calls=(kept, "capture_hook(out)"))
    monkeypatch.setattr(compat, "SYMBOLS", {"a": runner})
    assert compat.broken() == [
        f"a: sglang.{module}.DecodeCudaGraphRunner lost the call capture_hook(out)"
    ]


def test_contract_knows_fields_methods_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a dataclass, a struct, an enum, a module with buffers and a named tuple."""
    found = {
        "a": Symbol(
            "srt.model_executor.model_runner", "ModelRunnerOutput", attributes=("logits_output",)
        ),
        "b": Symbol("srt.sampling.sampling_params", "SamplingParams", attributes=("min_p",)),
        "c": Symbol(
            "srt.speculative.spec_info", "SpeculativeAlgorithm", attributes=("is_dflash", "NONE")
        ),
        "d": Symbol("srt.models.gemma4_causal", "Gemma4DecoderLayer", attributes=("layer_scalar",)),
        "e": Symbol("srt.constrained.base_grammar_backend", "GrammarMask", attributes=("grammar",)),
    }
    monkeypatch.setattr(compat, "SYMBOLS", found)
    assert compat.broken() == []


def test_contract_lists_results_and_assignments_that_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pair that became one tensor would be taken apart along its rows."""
    pair = "(output, output_bias)"
    symbols = {
        "a": Symbol("srt.layers.linear", "RowParallelLinear.forward", returns=(pair, "output")),
        "b": Symbol("srt.layers.linear", "RowParallelLinear.forward", sets=("self.nonsense",)),
    }
    monkeypatch.setattr(compat, "SYMBOLS", symbols)
    assert compat.broken() == [
        "a: sglang.srt.layers.linear.RowParallelLinear.forward lost the result output",
        "b: sglang.srt.layers.linear.RowParallelLinear.forward lost what it sets, self.nonsense",
    ]


def test_a_hooked_function_is_judged_by_its_own_source() -> None:
    """Ours stands around it by now."""
    hooked = compat.SYMBOLS["model_specific_adjustments"]
    assert hooked.dotted in compat.HookRegistry._patched
    assert hooked.lost() == []


def test_a_symbol_may_be_a_module() -> None:
    module = Symbol("srt.layers.linear", "")
    assert module.dotted == "sglang.srt.layers.linear"
    assert module.resolve().__name__ == module.dotted
    assert module.lost() == []


def test_unknown_symbol_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="compat has no SGLang symbol 'nonsense'"):
        _ = compat.nonsense
