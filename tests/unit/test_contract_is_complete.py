"""Every attribute that glue/ reads from an SGLang object is in the contract, under its class.

A release could rename an attribute that is not there without `compat.broken()` reporting it. Files
that run with every release are checked against the tables of all, a release's own against its own.
A class that a release's table lacks is not used with that release.
OBJECTS maps the name of an object to its class. A parameter annotated `Any` comes from SGLang, so
its name must be in OBJECTS, or in OTHERS with what it is instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash.glue import release, symbols
from sglang_dflash.glue.contract import Symbol
from sglang_dflash.testing.server import ROOT

GLUE = ROOT / "sglang_dflash" / "glue"
TABLES = {version: symbols.of(version) for version in release.SERVED}
# every symbol of any release
NAMES = {name for table in TABLES.values() for name in table}
SOURCES = [
    path
    for path in sorted(GLUE.rglob("*.py"))
    if GLUE / "cpu" / "path" not in path.parents and path.name not in ("changes.py", "contract.py")
]
RUNNER = ("ModelRunner",)
WORKER = ("TpModelWorker",)
POOLS = ("MHATokenToKVPool", "SWAKVPool", "HybridLinearKVPool")
UPDATES = ("request_disk", "request_tensor", "request_distributed", "request_ipc")

# an expression, in all files or in one -> symbols; several if it may be one of several classes
OBJECTS: dict[str, tuple[str, ...]] = {
    "algorithm": ("SpeculativeAlgorithm",),
    "args": ("ServerArgs",),
    "backend": ("TritonAttnBackend",),
    "self._backend": ("TritonAttnBackend",),
    "backend.token_to_kv_pool": POOLS,
    "self._backend.token_to_kv_pool": ("SWAKVPool",),
    "batch": ("ScheduleBatch",),
    "batch.forward_mode": ("ForwardMode",),
    "batch.req_to_token_pool": ("ReqToTokenPool",),
    "batch.sampling_info": ("SamplingBatchInfo",),
    "batch.token_to_kv_pool_allocator": ("allocator",),
    "batch.tree_cache": ("BasePrefixCache", "SWAChunkCache", "SWARadixCache"),
    "bundle": ("DraftWorkerBundle",),
    "collector": ("MetricsCollector",),
    "compat.AttentionType": ("AttentionType",),
    "compat.CaptureHiddenMode": ("CaptureHiddenMode",),
    "compat.ForwardMode": ("ForwardMode",),
    "compat.ModelRegistry": ("ModelRegistry_kind",),
    "compat.SpecInputType": ("SpecInputType",),
    "compat.SpeculativeAlgorithm": ("SpeculativeAlgorithm",),
    "compat.get_parallel()": ("ParallelContext", "ParallelFields"),
    "compat.resolved_view(server_args)": ("ServerArgs",),
    "configurator": ("DefaultPoolConfigurator", "HybridSWAPoolConfigurator"),
    "dispatch_output": ("StandardDispatchOutput",),
    "draft_backend": ("FlashAttentionBackend",),
    "draft_result": ("ModelRunnerOutput",),
    "draft_runner": RUNNER,
    "runtime.target_runner": RUNNER,
    "self.model_runner.req_to_token_pool": ("ReqToTokenPool",),
    "step/verify_graphs.py:self.attn_backend": ("TritonAttnBackend",),
    "step/verify_graphs.py:self.buffers": ("DecodeInputBuffers",),
    "step/graph_times.py:runner": ("DecodeCudaGraphRunner",),
    "step/graph_times.py:draft": ("DecodeCudaGraphRunner",),
    "models/verify_backend.py:spec_info": ("DFlashVerifyInput",),
    "startup/width_args.py:graphs": ("PhaseConfig",),
    "startup/feature_capture.py:graphs": ("PhaseConfig",),
    "runtime.target_worker": WORKER,
    "programs/offline_engine.py:engine": ("Engine",),
    "forward_batch": ("ForwardBatch",),
    "forward_batch.forward_mode": ("ForwardMode",),
    "forward_batch.spec_info": ("DFlashVerifyInput",),
    "sampling/grammar_mask.py:grammar": ("BaseGrammarObject",),
    "future_map": ("FutureMap",),
    "group": ("GroupCoordinator",),
    "self._group": ("GroupCoordinator",),
    "verified": ("GenerationBatchResult",),
    "info": ("SamplingBatchInfo",),
    "models/verify_backend.py:kind": ("AttentionType",),
    "models/draft_model.py:kind": ("AttentionType",),
    "kv.pool": ("MHATokenToKVPool",),
    "kv_manager": ("KVManager",),
    "kv_manager.kv_args": ("KVArgs",),
    "kvc": ("KVCacheConfigurator",),
    "kvc.spec_algorithm": ("SpeculativeAlgorithm",),
    "models/verify_backend.py:layer": ("RadixAttention",),
    "cpu/attention.py:layer": ("RadixAttention",),
    "models/gemma4_layers.py:layer": ("Gemma4DecoderLayer",),
    "models/gemma4_layers.py:self._layer": ("Gemma4DecoderLayer",),
    "models/gemma4_layers.py:layer.router": ("Gemma4Router",),
    "models/gemma4_layers.py:layer.post_attention_layernorm": ("RMSNorm",),
    "models/gemma4_layers.py:layer.post_feedforward_layernorm": ("RMSNorm",),
    "models/gemma4_layers.py:attention": ("Gemma4Attention",),
    "models/gemma4_layers.py:own": ("Gemma4Attention",),
    "models/gemma4_layers.py:own.q_norm": ("Gemma4RMSNorm",),
    "models/gemma4_layers.py:own.k_norm": ("Gemma4RMSNorm",),
    "models/gemma4_layers.py:own.rotary_emb": ("RotaryEmbedding",),
    "models/gemma4_layers.py:attention.v_norm": ("Gemma4RMSNorm",),
    "models/gemma4_layers.py:norm": ("Gemma4RMSNorm",),
    "models/gemma4_layers.py:mlp": ("Gemma4MLP",),
    "models/gemma4_layers.py:module": ("Gemma4Router", "RowParallelLinear"),
    "models/verify_backend.py:whole": ("HybridLinearAttnBackend",),
    "step/recurrent_states.py:self._runner.attn_backend": ("HybridLinearAttnBackend",),
    "step/recurrent_states.py:target_runner": RUNNER,
    "step/recurrent_states.py:target_runner.model_config": ("ModelConfig",),
    "startup/recurrent_targets.py:compat.mamba_state_dtype(None)": ("MambaStateDType",),
    "cpu/linear_attention.py:caches": ("SpeculativeState",),
    "cpu/linear_attention.py:norm": ("FusedRMSNormGated", "GatedLayerNorm"),
    "cpu/norms.py:norm": ("Gemma4RMSNorm",),
    "cpu/experts.py:method": ("UnquantizedFusedMoEMethod",),
    "cpu/experts.py:layer": ("FusedMoE",),
    "cpu/experts.py:chosen": ("StandardTopKOutput",),
    "cpu/quantised.py:scheme": ("CompressedTensorsWNA16",),
    "logits_output": ("LogitsProcessorOutput",),
    "step/batch_host.py:output": ("LogitsProcessorOutput",),
    "step/graph_outputs.py:output": ("LogitsProcessorOutput",),
    "result.logits_output": ("LogitsProcessorOutput",),
    "models/verify_backend.py:m": ("RadixAttention",),
    "manager": ("TokenizerManager",),
    "sampling/row_sampler.py:mask": ("GrammarMask",),
    "models/verify_backend.py:metadata": ("TritonMetadata",),
    "models/heads.py:metadata": ("LogitsMetadata",),
    "metadata.forward_mode": ("ForwardMode",),
    "cpu/attention.py:mode": ("ForwardMode",),
    "model_config": ("ModelConfig",),
    "startup/server_args.py:target_config": ("ModelConfig",),
    "model_runner": RUNNER,
    "params": ("SamplingParams",),
    "sampling/penalties.py:p": ("SamplingParams",),
    "req.sampling_params": ("SamplingParams",),
    "pool": POOLS,
    "prefill": ("PrefillServerInfo",),
    "processor": ("LogitsProcessor",),
    "recv_obj": ("answers", "answers_of_text"),
    "recv_req": UPDATES,
    "reporter": ("MetricsReporter",),
    "req": ("Req",),
    "req.grammar": ("BaseGrammarObject",),
    "req.kv": ("ReqKvInfo",),
    "req_to_token_pool": ("ReqToTokenPool",),
    "step/batch_host.py:result": ("ModelRunnerOutput",),
    "step/worker.py:result": ("GenerationBatchResult",),
    "models/verify_backend.py:runner": RUNNER,
    "step/graph_outputs.py:runner": ("DecodeCudaGraphRunner",),
    "scheduler": ("Scheduler",),
    "scheduler.ps": ("ParallelState",),
    "scheduler.spec_algorithm": ("SpeculativeAlgorithm",),
    "scheduler.token_to_kv_pool_allocator": ("allocator",),
    "self._runtime.target_runner": RUNNER,
    "self._runtime.target_runner.req_to_token_pool": ("ReqToTokenPool",),
    "self._runner": RUNNER,
    "self._scheduler": ("Scheduler",),
    "self._target_worker": WORKER,
    "self.runtime.draft_runner": RUNNER,
    "self.model_runner": RUNNER,
    "self.model_runner.model_config": ("ModelConfig",),
    "self.req_to_token_pool": ("ReqToTokenPool",),
    "self.target_result": ("GenerationBatchResult",),
    "self.target_runner": RUNNER,
    "self.target_runner.model_config": ("ModelConfig",),
    "self.token_to_kv_pool": POOLS,
    "server_args": ("ServerArgs",),
    "startup/width_args.py:server_args": ("ServerArgs", "cuda_graph_locks"),
    "startup/feature_capture.py:server_args": ("ServerArgs", "cuda_graph_locks"),
    "models/embedding.py:module": ("BaseLayerWithLoRA",),
    "seams.model_config(server_args)": ("ModelConfig",),
    "settings": ("ServerArgs",),
    "seams.settings(manager.server_args)": ("ServerArgs",),
    "seams.settings(server_args)": ("ServerArgs",),
    "seams.settings(scheduler.server_args)": ("ServerArgs",),
    "answer": ("answer_disk", "answer_tensor", "answer_distributed", "answer_ipc"),
    "backend.kv_index_translator": ("KVIndexTranslator",),
    "translator": ("KVIndexTranslator",),
    "translator.own_plan(forward_batch)": ("KVLocPlan",),
    "seams/sglang_0_5_17.py:linear": ("RowParallelLinear",),
    "seams/sglang_0_5_23.py:linear": ("RowParallelLinear",),
    "seams/sglang_0_5_17.py:runner": RUNNER,
    "seams/sglang_0_5_23.py:runner": RUNNER,
    "updater": ("SchedulerWeightUpdater",),
    "updater.tp_worker": WORKER,
    "updater.tp_worker.model_runner": RUNNER,
    "updater.tp_worker.model_runner.spec_algorithm": ("SpeculativeAlgorithm",),
    "shard": ("ShardIndices",),
    "models/heads.py:head": ("VocabParallelEmbedding",),
    "target_worker": WORKER,
    "target_worker.model_runner": RUNNER,
    "verify_input": ("DFlashVerifyInput",),
    "verify_result": ("GenerationBatchResult",),
}
# attributes of torch modules; weights are created by quantisation methods
OF_TORCH = {"bias", "get_submodule", "weight"}
# entries that are used without being named
ALSO_USED = {
    "compressed_weights": "which parameters a layer has before `compressed_process`",
    "awq_weights": "which parameters a layer has before `awq_process`",
    "GetInternalStateReqOutput": "handed out by `Fields.edit`",
    "Gemma4MoE": "a layer's `moe`, called by position",
    "rotary_forward": "a drafter's `rotary_emb`, called by position",
    "gemma4_layer_result": "what our layer returns in its place",
    "gemma4_parts": "what SGLang's layer sums over the ranks",
    "gemma4_stages": "how SGLang's layer leaves its residual",
    "norm_forward": "a drafter's norms, called",
    "verify_preparation": "that it chooses snapshots is what `chooses_snapshots` says",
    "process_prebuilt": "how SGLang calls our `begin_decoding`",
    "row_parallel_forward": "a drafter's products, called",
    "column_parallel_forward": "a drafter's products, called",
    "model_hook_backends": "replaced under its name in that module",
    "scheduler_update_disk": "hooked by their common name",
    "scheduler_update_distributed": "hooked by their common name",
    "scheduler_update_tensor": "hooked by their common name",
    "scheduler_update_ipc": "hooked by their common name",
    "whole_MergedColumnParallelLinear": "a drafter's layers, if the ranks cannot share it",
    "whole_QKVParallelLinear": "a drafter's layers, if the ranks cannot share it",
    "whole_RowParallelLinear": "a drafter's layers, if the ranks cannot share it",
    "linear_group": "what the layers of such a drafter are told",
    "draft_budget": "how SGLang calls our `budget_whole_drafter`",
    "update_disk": "replaced by their common name",
    "update_distributed": "replaced by their common name",
    "update_tensor": "replaced by their common name",
    "update_ipc": "replaced by their common name",
}
# parameters that are not SGLang objects with a class of their own
OTHERS = {
    "after_step/stage_clock.py:begin": "a CUDA event, or a time on the host",
    "after_step/stage_clock.py:end": "the same",
    "after_step/stage_clock.py:moment": "the same",
    "attention": "our VerifyAttention, or a layer of our drafter",
    "config": "a model's own config",
    "host": "our BatchHost",
    "lm_head": "any head that a model has; checked when it is taken",
    "linear": "a linear layer; its weight is made by its quantisation method",
    "model": "any module; what it has is asked of it",
    "original": "what a hook stands around",
    "param": "a torch parameter",
    "target_model": "any model; what it has is asked of it",
    "text": "a model's own config",
    "tokenizer": "a tokenizer of transformers",
    "unusual": "keywords, which are ours to count",
    "weight": "a tensor",
    "cpu/products.py:layer": "a linear layer; its weight is made by its quantisation method",
    "cpu/quantised.py:layer": "the same; the names of its parameters are in the contract as calls",
}


def tables_for(file: str) -> list[dict[str, Symbol]]:
    """Return the contracts that a file has to keep."""
    own = [v for v in TABLES if file == f"seams/sglang_{v.replace('.', '_')}.py"]
    return [TABLES[version] for version in own or TABLES]


def objects_in(tree: ast.AST, file: str) -> Iterator[tuple[ast.Attribute, tuple[str, ...]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node.value)
            symbols = OBJECTS.get(f"{file}:{text}") or OBJECTS.get(text)
            if symbols is not None:
                yield node, symbols


def known(name: str, table: dict[str, Symbol]) -> set[str]:
    """Return what a contract lists for a class: its own entry and those of its methods."""
    kind = table[name]
    methods = {
        symbol.attr.removeprefix(f"{kind.attr}.")
        for symbol in table.values()
        if symbol.module == kind.module and symbol.attr.startswith(f"{kind.attr}.")
    }
    return kind.known | methods


def unknown_accesses(source: str, file: str) -> list[str]:
    found = []
    for node, names in objects_in(ast.parse(source), file):
        for table in tables_for(file):
            here = [name for name in names if name in table]
            if here and not any(node.attr in known(name, table) for name in here):
                found.append(f"{node.lineno}: {ast.unparse(node)} is not in {' or '.join(here)}")
                break
    return [line for line in found if line.split()[1].rpartition(".")[2] not in OF_TORCH]


def unknown_parameters(source: str, file: str) -> list[str]:
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        read = {
            node.value.id
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        arguments = (*function.args.args, *function.args.kwonlyargs)
        found += [
            f"{function.lineno}: {argument.arg} of {function.name}"
            for argument in arguments
            if argument.annotation is not None
            and ast.unparse(argument.annotation) == "Any"
            and argument.arg in read
            and not {argument.arg, f"{file}:{argument.arg}"} & (OBJECTS.keys() | OTHERS.keys())
        ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(GLUE)))
def test_what_is_read_through_objects_is_in_the_contract(path: Path) -> None:
    file = str(path.relative_to(GLUE))
    assert unknown_accesses(path.read_text(), file) == [], "add it to its class in glue/symbols/"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(GLUE)))
def test_every_object_of_sglang_has_a_class(path: Path) -> None:
    file = str(path.relative_to(GLUE))
    assert unknown_parameters(path.read_text(), file) == [], "name its class in OBJECTS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(GLUE)))
def test_what_is_written_to_objects_is_in_the_contract(path: Path) -> None:
    """Writing a field that SGLang no longer reads would have no effect."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="Fields" | "Settings"),
                args=[ast.Constant(value=str(target)), ast.Dict(keys=keys)],
            ) if target in NAMES:
                written = {key.value for key in keys if isinstance(key, ast.Constant)}
                for table in tables_for(str(path.relative_to(GLUE))):
                    if target in table:
                        assert written <= known(target, table), f"{target} in {path.name}"


def test_a_seeded_access_is_found() -> None:
    source = "def f(batch: Any, thing: Any) -> None:\n    batch.req_lens\n    thing.size"
    assert unknown_accesses(source, "x.py") == ["2: batch.req_lens is not in ScheduleBatch"]
    assert unknown_parameters(source, "x.py") == ["1: thing of f"]


def test_the_tables_hold_nothing_that_is_gone() -> None:
    """A stale entry would hide the next object of that name."""
    used = set()
    for path in SOURCES:
        file = str(path.relative_to(GLUE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                used |= {ast.unparse(node.value), f"{file}:{ast.unparse(node.value)}"}
            elif isinstance(node, ast.arg):
                used |= {node.arg, f"{file}:{node.arg}"}
    assert (OBJECTS.keys() | OTHERS.keys()) - used == set()
    named = {name for names in OBJECTS.values() for name in names}
    assert named <= NAMES


def test_every_symbol_of_the_contract_is_used() -> None:
    """An unused symbol would pin SGLang for no reason."""
    text = "".join(
        path.read_text()
        for path in (*SOURCES, GLUE / "changes.py")
        if GLUE / "symbols" not in path.parents
    )
    named = {name for names in OBJECTS.values() for name in names}

    def is_used(name: str, symbol: Symbol) -> bool:
        method = symbol.attr.rpartition(".")
        return (
            f"compat.{name}" in text
            or f'"{name}"' in text
            or name in named
            # called, replaced or overridden
            or (
                method[1] == "."
                and any(
                    use in text for use in (f".{method[2]}", f'"{method[2]}"', f"def {method[2]}(")
                )
            )
            or name in ALSO_USED
        )

    for version, table in TABLES.items():
        unused = [name for name, symbol in table.items() if not is_used(name, symbol)]
        assert unused == [], f"of {version}"
