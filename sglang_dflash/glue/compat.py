"""The only file that names SGLang's modules, and the contract we hold the release to.

Each symbol is imported when it is first used, so that the plug-in stays cheap to load. `broken()`
lists everything that the installed release has moved, renamed or given another signature.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sglang_dflash.glue.contract import Symbol

# the server arguments that we read or set
SERVER_ARGS = """
    device pp_size page_size disaggregation_mode enable_mixed_chunk max_running_requests
    disable_overlap_schedule speculative_draft_model_path speculative_draft_model_revision
    speculative_num_draft_tokens speculative_num_steps speculative_eagle_topk
    speculative_dflash_block_size speculative_draft_window_size
    speculative_draft_attention_backend speculative_draft_model_quantization
    speculative_accept_threshold_single speculative_accept_threshold_acc
    json_model_override_args trust_remote_code skip_tokenizer_init sampling_backend
    cuda_graph_max_bs_decode disable_prefill_cuda_graph enable_torch_compile enable_pdmux
    dcp_size enable_hierarchical_cache enable_memory_saver
"""

SYMBOLS: dict[str, Symbol] = {
    # plug-in and arguments
    "HookRegistry": Symbol("srt.plugins.hook_registry", "HookRegistry"),
    "HookType": Symbol("srt.plugins.hook_registry", "HookType"),
    "ServerArgs": Symbol("srt.server_args", "ServerArgs", tuple(SERVER_ARGS.split())),
    "Engine": Symbol("srt.entrypoints.engine", "Engine"),
    "resolved_view": Symbol("srt.arg_groups.overrides", "resolved_view"),
    "attention_backends_of": Symbol("srt.arg_groups.overrides", "attention_backends_of"),
    "get_config": Symbol(
        "srt.utils.hf_transformers_utils",
        "get_config",
        ("model", "trust_remote_code", "revision", "model_override_args"),
    ),
    "get_rope_config": Symbol("srt.utils.hf_transformers_utils", "get_rope_config", ("config",)),
    "mambaish_config": Symbol("srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
    "get_linear_attn_config": Symbol(
        "srt.configs.linear_attn_model_registry", "get_linear_attn_config", ("hf_config",)
    ),
    "get_server_args": Symbol("srt.runtime_context", "get_server_args"),
    "get_parallel": Symbol("srt.runtime_context", "get_parallel"),
    # what the plug-in hooks
    "create_worker": Symbol(
        "srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", ("server_args",)
    ),
    "prepare_server_args": Symbol("srt.server_args", "prepare_server_args", ("argv",)),
    "model_source_paths": Symbol("srt.server_args", "ServerArgs._handle_model_source_paths"),
    "handle_dflash": Symbol("srt.arg_groups.speculative_hook", "_handle_dflash", ("server_args",)),
    "resolve_alias": Symbol(
        "srt.arg_groups.speculative_hook",
        "_resolve_speculative_algorithm_alias",
        ("speculative_algorithm",),
    ),
    "validate_request": Symbol(
        "srt.speculative.dflash_utils", "validate_dflash_request", ("req", "enable_overlap")
    ),
    "update_finish_state": Symbol(
        "srt.managers.schedule_batch", "Req.update_finish_state", ("new_accepted_len",)
    ),
    "row_headroom": Symbol(
        "srt.mem_cache.allocation_sizing", "get_req_to_token_extra_context_len", ("server_args",)
    ),
    "configure_capture": Symbol(
        "srt.model_executor.model_runner_components.attention_backend_setup",
        "configure_aux_hidden_state_capture",
        ("model", "dflash_use_aux_hidden_state", "dflash_target_layer_ids"),
    ),
    "default_pool_init": Symbol(
        "srt.model_executor.pool_configurator", "DefaultPoolConfigurator.__init__", ("kvc",)
    ),
    "swa_pool_init": Symbol(
        "srt.model_executor.pool_configurator", "HybridSWAPoolConfigurator.__init__", ("kvc",)
    ),
    "internal_state": Symbol(
        "srt.managers.scheduler", "Scheduler.get_internal_state", ("recv_req",)
    ),
    "run_event_loop": Symbol("srt.managers.scheduler", "Scheduler.run_event_loop"),
    "spec_metrics": Symbol(
        "srt.managers.tokenizer_manager",
        "TokenizerManager._calculate_spec_decoding_metrics",
        ("meta_info", "recv_obj", "i"),
    ),
    # worker
    "BaseSpecWorker": Symbol("srt.speculative.base_spec_worker", "BaseSpecWorker"),
    "SpeculativeAlgorithm": Symbol("srt.speculative.spec_info", "SpeculativeAlgorithm"),
    "SpecInput": Symbol("srt.speculative.spec_info", "SpecInput", ("spec_input_type",)),
    "SpecInputType": Symbol("srt.speculative.spec_info", "SpecInputType"),
    "DFlashVerifyInput": Symbol(
        "srt.speculative.dflash_info",
        "DFlashVerifyInput",
        ("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode"),
    ),
    "prepare_for_verify": Symbol(
        "srt.speculative.dflash_info",
        "DFlashVerifyInput.prepare_for_verify",
        ("batch", "target_worker"),
    ),
    "build_draft_tp_worker": Symbol(
        "srt.speculative.draft_worker_common",
        "build_draft_tp_worker",
        (
            "server_args",
            "gpu_id",
            "ps",
            "nccl_port",
            "target_model_config",
            "algo_label",
            "attention_backend_override",
        ),
    ),
    "GenerationBatchResult": Symbol(
        "srt.managers.utils",
        "GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "next_draft_input",
            "can_run_cuda_graph",
            "speculative_num_draft_tokens",
            "new_seq_lens",
            "extra_keep_alive_refs",
        ),
    ),
    "target_forward": Symbol(
        "srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "is_verify", "capture_hidden_mode"),
    ),
    **{
        f"update_{s}": Symbol("srt.managers.tp_worker", f"TpModelWorker.update_weights_from_{s}")
        for s in ("disk", "tensor", "distributed", "ipc")
    },
    "is_fully_idle": Symbol("srt.managers.scheduler", "Scheduler.is_fully_idle"),
    "flush_cache": Symbol("srt.managers.scheduler", "Scheduler.flush_cache", ("empty_cache",)),
    "process_batch_result": Symbol(
        "srt.managers.scheduler", "Scheduler.process_batch_result", ("batch", "result")
    ),
    "filter_batch": Symbol("srt.managers.schedule_batch", "ScheduleBatch.filter_batch"),
    "alloc_for_spec_decode": Symbol(
        "srt.mem_cache.allocation",
        "alloc_for_spec_decode",
        (
            "tree_cache",
            "req_to_token_pool",
            "reqs",
            "req_pool_indices",
            "cur_kv_lens",
            "cur_kv_lens_cpu",
            "nxt_kv_lens",
            "nxt_kv_lens_cpu",
            "num_needed_tokens",
            "batch",
        ),
    ),
    "alloc_reserve_per_decode": Symbol(
        "srt.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", ("server_args",)
    ),
    "maybe_evict_swa": Symbol("srt.managers.schedule_batch", "ScheduleBatch.maybe_evict_swa"),
    "evict_swa": Symbol(
        "srt.managers.schedule_batch", "ScheduleBatch._evict_swa", ("req", "pre_len")
    ),
    "ForwardBatch": Symbol(
        "srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
        ),
    ),
    "ForwardMode": Symbol("srt.model_executor.forward_batch_info", "ForwardMode"),
    "CaptureHiddenMode": Symbol("srt.model_executor.forward_batch_info", "CaptureHiddenMode"),
    "SamplingBatchInfo": Symbol(
        "srt.sampling.sampling_batch_info",
        "SamplingBatchInfo",
        ("temperatures", "top_ps", "top_ks", "min_ps", "is_all_greedy", "sampling_seed"),
    ),
    "Sampler_forward": Symbol(
        "srt.layers.sampler",
        "Sampler.forward",
        (
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
    ),
    # draft model
    "ModelRegistry": Symbol("srt.models.registry", "ModelRegistry"),
    "default_weight_loader": Symbol(
        "srt.model_loader.weight_utils", "default_weight_loader", ("param", "loaded_weight")
    ),
    "RMSNorm": Symbol("srt.layers.layernorm", "RMSNorm"),
    "SiluAndMul": Symbol("srt.layers.activation", "SiluAndMul"),
    "QKVParallelLinear": Symbol("srt.layers.linear", "QKVParallelLinear"),
    "RowParallelLinear": Symbol("srt.layers.linear", "RowParallelLinear"),
    "MergedColumnParallelLinear": Symbol("srt.layers.linear", "MergedColumnParallelLinear"),
    "get_rope": Symbol(
        "srt.layers.rotary_embedding",
        "get_rope",
        ("head_size", "rotary_dim", "max_position", "base", "rope_scaling"),
    ),
    "RadixAttention": Symbol(
        "srt.layers.radix_attention",
        "RadixAttention",
        (
            "num_heads",
            "head_dim",
            "scaling",
            "num_kv_heads",
            "layer_id",
            "sliding_window_size",
            "attn_type",
        ),
    ),
    "AttentionType": Symbol("srt.layers.radix_attention", "AttentionType"),
    "LogitsProcessorOutput": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessorOutput",
        ("next_token_logits", "hidden_states"),
    ),
    "get_tp_group": Symbol("srt.distributed", "get_tp_group"),
    # attention
    "TritonAttnBackend": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend",
        # read to choose a kernel, or written to where nobody would miss them
        attributes=(
            "enable_deterministic",
            "dcp_size",
            "_translate_kv_loc",
            "use_sliding_window_kv_pool",
            "cuda_graph_swa_out_cache_loc",
            "_verify_mask",
        ),
    ),
    "logit_capping_mod": Symbol(
        "srt.layers.attention.triton_backend",
        "logit_capping_mod",
        ("logit_capping_method", "logit_cap"),
    ),
    "triton_forward_extend": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend.forward_extend",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    "triton_verify_buffers": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend._update_target_verify_buffers",
        ("bs", "seq_lens", "req_pool_indices", "spec_info"),
    ),
    "triton_graph_state": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend.init_cuda_graph_state",
        ("max_bs", "max_num_tokens"),
    ),
    "flash_plan_in_graph": Symbol(
        "srt.layers.attention.flashattention_backend",
        "FlashAttentionBackend.init_forward_metadata_in_graph",
    ),
    # layers
    "gemma4_layer": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer.forward",
        ("positions", "hidden_states", "per_layer_input", "forward_batch"),
    ),
    "fuse_scale": Symbol("srt.models.gemma4_causal", "Gemma4Router.fuse_scale"),
    # head
    "LogitsProcessor": Symbol("srt.layers.logits_processor", "LogitsProcessor"),
    "get_logits": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor._get_logits",
        ("hidden_states", "lm_head", "logits_metadata", "embedding_bias"),
    ),
    "compute_lm_head": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor._compute_lm_head",
        ("hidden_states", "lm_head", "embedding_bias"),
    ),
    "VocabParallelEmbedding": Symbol(
        "srt.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding",
        attributes=("shard_indices", "quant_method"),
    ),
    "ShardIndices": Symbol(
        "srt.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        attributes=("org_vocab_start_index", "num_org_elements"),
    ),
    "fused_softcap": Symbol("srt.layers.logits_processor", "fused_softcap"),
    # sampling
    "GrammarMask": Symbol(
        "srt.constrained.base_grammar_backend", "GrammarMask", ("grammar", "vocab_mask")
    ),
    "apply_custom_logit_processor": Symbol(
        "srt.layers.sampler", "apply_custom_logit_processor", ("logits", "sampling_batch_info")
    ),
    # sampling on a CPU
    "add_deterministic_choices": Symbol(
        "srt.server_args", "add_deterministic_attention_backend_choices", ("choices",)
    ),
    "add_radix_deterministic_choices": Symbol(
        "srt.server_args",
        "add_radix_supported_deterministic_attention_backend_choices",
        ("choices",),
    ),
    "batch_invariant_mode": Symbol(
        "srt.model_executor.model_runner", "ModelRunner.maybe_enable_batch_invariant_mode"
    ),
    "murmur_hash32": Symbol(
        "srt.layers.sampler", "murmur_hash32", ("seed", "positions", "col_indices")
    ),
    "allocate_token_bitmask": Symbol(
        "srt.constrained.xgrammar_backend", "_allocate_token_bitmask", ("vocab_size", "batch_size")
    ),
    "apply_vocab_mask": Symbol(
        "srt.constrained.xgrammar_backend",
        "XGrammarGrammar.apply_vocab_mask",
        ("logits", "vocab_mask"),
    ),
    # products and experts on a CPU
    "unquantized_linear": Symbol(
        "srt.layers.quantization.unquant", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")
    ),
    "unquantized_experts": Symbol(
        "srt.layers.quantization.unquant",
        "UnquantizedFusedMoEMethod.forward_native",
        ("layer", "dispatch_output"),
    ),
    "moe_forward_native": Symbol(
        "srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        ("layer", "x", "topk_output", "moe_runner_config"),
    ),
    "StandardCombineInput": Symbol(
        "srt.layers.moe.token_dispatcher", "StandardCombineInput", ("hidden_states",)
    ),
    "gemma4_norm": Symbol("srt.layers.layernorm", "Gemma4RMSNorm.forward_native", ("x",)),
    # attention on a CPU
    "AttentionBackend": Symbol("srt.layers.attention.base_attn_backend", "AttentionBackend"),
    "register_attention_backend": Symbol(
        "srt.layers.attention.attention_registry", "register_attention_backend", ("name",)
    ),
    "KVWriteLoc": Symbol("srt.mem_cache.memory_pool", "KVWriteLoc"),
    "SWAKVPool": Symbol(
        "srt.mem_cache.swa_memory_pool",
        "SWAKVPool",
        attributes=("full_to_swa_index_mapping", "translate_loc_from_full_to_swa"),
    ),
    "resolved_backends": Symbol("srt.server_args", "ServerArgs._resolved_attention_backends"),
    "model_specific_adjustments": Symbol(
        "srt.server_args", "ServerArgs._handle_model_specific_adjustments"
    ),
    "set_envs_and_config": Symbol(
        "srt.entrypoints.engine", "_set_envs_and_config", ("server_args",)
    ),
    "init_cpu_threads": Symbol("srt.distributed.bootstrap", "_init_cpu_threads_env"),
    "update_intermediate_size": Symbol(
        "srt.configs.update_config",
        "update_intermediate_size",
        ("model_config", "attr_name", "intermediate_padding_size"),
    ),
}


def __getattr__(name: str) -> Any:
    if name not in SYMBOLS:
        raise AttributeError(f"compat knows no SGLang symbol {name!r}")
    value = globals()[name] = SYMBOLS[name].resolve()
    return value


def registered_plugins() -> list[str]:
    """Return the entry points that SGLang will load."""
    return [entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")]


def broken() -> list[str]:
    """Return one line for each symbol that the installed SGLang no longer offers as we use it."""
    lines = []
    for name, symbol in SYMBOLS.items():
        try:
            lost = symbol.lost()
        except (ImportError, AttributeError) as error:
            lines.append(f"{name}: {symbol.dotted} is gone ({error})")
            continue
        if lost:
            lines.append(f"{name}: {symbol.dotted} lost {', '.join(lost)}")
    return lines
