"""What only SGLang 0.5.17 has, or has in this form."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

# attributes beyond those in the other tables, by symbol
ALSO: dict[str, tuple[str, ...]] = {
    "MergedColumnParallelLinear": ("tp_size",),
    "ParallelContext": ("tp_size",),
    "Req": names("kv_committed_len req_pool_idx"),
    "ReqKvInfo": ("swa_evicted_seqlen",),
    "RowParallelLinear": ("tp_size",),
    "ScheduleBatch": ("_evict_swa",),
    "Scheduler": ("ps",),
    "ServerArgs": names("get_model_config _resolved_attention_backends _cuda_graph_config_locked"),
    "TritonAttnBackend": ("_translate_kv_loc",),
}

SYMBOLS: dict[str, Symbol] = {
    "model_source_paths": Symbol(
        "srt.server_args", "ServerArgs._handle_model_source_paths", takes=()
    ),
    "row_headroom": Symbol(
        "srt.mem_cache.allocation_sizing",
        "get_req_to_token_extra_context_len",
        takes=("server_args",),
    ),
    "default_pool_init": Symbol(
        "srt.model_executor.pool_configurator", "DefaultPoolConfigurator.__init__", takes=("kvc",)
    ),
    "swa_pool_init": Symbol(
        "srt.model_executor.pool_configurator", "HybridSWAPoolConfigurator.__init__", takes=("kvc",)
    ),
    "ParallelState": Symbol(
        "srt.distributed.parallel_state_wrapper",
        "ParallelState",
        attributes=names("dp_rank pp_rank"),
    ),
    "KVCacheConfigurator": Symbol(
        "srt.mem_cache.kv_cache_configurator",
        "KVCacheConfigurator",
        attributes=names("is_draft_worker kv_cache_dtype model_dtype server_args spec_algorithm"),
    ),
    "DefaultPoolConfigurator": Symbol(
        "srt.model_executor.pool_configurator",
        "DefaultPoolConfigurator",
        attributes=("_cell_size",),
    ),
    "HybridSWAPoolConfigurator": Symbol(
        "srt.model_executor.pool_configurator",
        "HybridSWAPoolConfigurator",
        attributes=("_cell_size",),
    ),
    **{
        f"update_{source}": Symbol(
            "srt.managers.tp_worker",
            f"TpModelWorker.update_weights_from_{source}",
            takes=("recv_req",),
            returns=("(success, message)",),
        )
        for source in ("disk", "tensor", "distributed", "ipc")
    },
    "begin_decoding": Symbol(
        "srt.speculative.spec_info",
        "SpeculativeAlgorithm.build_disagg_draft_input",
        takes=names("batch server_args last_tokens_tensor future_map"),
    ),
    "process_prebuilt": Symbol(
        "srt.disaggregation.decode_schedule_batch_mixin",
        "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt",
        calls=(
            "self.spec_algorithm.build_disagg_draft_input("
            "self, server_args, last_tokens_tensor, future_map)",
        ),
    ),
    "worker_init": Symbol(
        "srt.speculative.dflash_worker_v2",
        "DFlashWorkerV2.__init__",
        takes=names("server_args gpu_id ps nccl_port target_worker"),
    ),
    "worker_forward": Symbol(
        "srt.speculative.dflash_worker_v2",
        "DFlashWorkerV2.forward_batch_generation",
        takes=names("batch on_publish grammar_barrier"),
    ),
    "build_draft_tp_worker": Symbol(
        "srt.speculative.draft_worker_common",
        "build_draft_tp_worker",
        names(
            """server_args gpu_id ps nccl_port target_model_config algo_label
            attention_backend_override"""
        ),
    ),
    "alloc_reserve_per_decode": Symbol(
        "srt.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", order=("server_args",)
    ),
    "SWAChunkCache": Symbol(
        "srt.mem_cache.chunk_cache", "SWAChunkCache", attributes=("sliding_window_size",)
    ),
    "SWARadixCache": Symbol(
        "srt.mem_cache.swa_radix_cache", "SWARadixCache", attributes=("sliding_window_size",)
    ),
    "evict_swa": Symbol(
        "srt.managers.schedule_batch", "ScheduleBatch._evict_swa", order=names("req pre_len")
    ),
    "triton_verify_buffers": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend._update_target_verify_buffers",
        takes=names("bs seq_lens req_pool_indices spec_info"),
    ),
    **{
        f"whole_{name}": Symbol("srt.layers.linear", name, names("tp_rank tp_size"))
        for name in names("QKVParallelLinear MergedColumnParallelLinear RowParallelLinear")
    },
    "gemma4_layer_result": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer.forward",
        returns=("(hidden_states, None)",),
    ),
    "compute_lm_head": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor._compute_lm_head",
        takes=names("hidden_states lm_head embedding_bias"),
    ),
    "add_deterministic_choices": Symbol(
        "srt.server_args", "add_deterministic_attention_backend_choices", order=("choices",)
    ),
    "add_radix_deterministic_choices": Symbol(
        "srt.server_args",
        "add_radix_supported_deterministic_attention_backend_choices",
        order=("choices",),
    ),
    "model_specific_adjustments": Symbol(
        "srt.server_args", "ServerArgs._handle_model_specific_adjustments", takes=()
    ),
}
