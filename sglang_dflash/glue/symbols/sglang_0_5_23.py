"""What only SGLang 0.5.23 has, or has in this form."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

WEIGHT_UPDATER = "srt.managers.scheduler_components.weight_updater"

# attributes beyond those in the other tables, by symbol
ALSO: dict[str, tuple[str, ...]] = {
    "BasePrefixCache": ("page_size",),
    "ForwardBatch": ("residual_stream",),
    "MergedColumnParallelLinear": ("tp_group",),
    "ModelRunner": ("kv_index_translator",),
    "ParallelContext": ("dp_rank",),
    "Req": names("eos_token_ids return_sampling_mask"),
    "ReqKvInfo": names("kv_committed_len req_pool_idx"),
    "RowParallelLinear": ("tp_group",),
    "ServerArgs": names(
        "attn_cp_size attn_dp_size enable_unified_memory enable_watermark"
        " _speculative_draft_quantization_explicitly_set speculative_draft_kv_cache_dtype"
    ),
    "TritonAttnBackend": ("kv_index_translator",),
}

SYMBOLS: dict[str, Symbol] = {
    # arguments
    "ResolvingConfig": Symbol("srt.arg_groups.overrides", "ResolvingConfig"),
    "resolving_view": Symbol("srt.arg_groups.overrides", "resolving_view", order=("server_args",)),
    "record_of": Symbol("srt.arg_groups.overrides", "record_of", order=("view",)),
    "declare_resolution": Symbol(
        "srt.arg_groups.overrides", "declare_resolution", order=names("server_args source")
    ),
    "model_config_of": Symbol(
        "srt.arg_groups.overrides", "model_config_of", order=("server_args",)
    ),
    # a set of (phase, key) that the user gave
    "cuda_graph_locks": Symbol(
        "srt.arg_groups.cuda_graph_hook",
        "parse_cuda_graph_config",
        sets=("server_args._cuda_graph_config_locked",),
    ),
    "ParallelFields": Symbol("srt.arg_groups.fields.parallel", "Parallel", attributes=("tp_size",)),
    "model_source_paths": Symbol(
        "srt.arg_groups.model_path_hook", "handle_model_source_paths", takes=("server_args",)
    ),
    "resolve_once": Symbol("srt.server_args", "ServerArgs.resolve_once", takes=()),
    # memory
    "row_headroom": Symbol(
        "srt.mem_cache.allocation_sizing", "get_req_to_token_extra_context_len", takes=()
    ),
    "alloc_reserve_per_decode": Symbol(
        "srt.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", takes=()
    ),
    "mamba_track_grid": Symbol("srt.runtime_context", "mamba_track_grid", order=("tree_page",)),
    # it chooses the snapshots of recurrent states
    "verify_preparation": Symbol(
        "srt.speculative.dflash_info",
        "DFlashVerifyInput.prepare_for_verify",
        calls=("prepare_mamba_track_for_verify(batch)",),
    ),
    "HybridLinearKVPool": Symbol(
        "srt.mem_cache.memory_pool",
        "HybridLinearKVPool",
        attributes=names("get_key_buffer get_value_buffer get_kv_buffer set_kv_buffer"),
    ),
    "HybridLinearKVPool_write": Symbol(
        "srt.mem_cache.memory_pool",
        "HybridLinearKVPool.set_kv_buffer",
        order=names("layer loc_info cache_k cache_v k_scale"),
    ),
    "KVIndexTranslator": Symbol(
        "srt.mem_cache.kv_index_translator", "KVIndexTranslator", attributes=("is_translating",)
    ),
    "own_plan": Symbol(
        "srt.mem_cache.kv_index_translator",
        "KVIndexTranslator.own_plan",
        order=("forward_batch",),
    ),
    "KVLocPlan": Symbol("srt.mem_cache.kv_loc_plan", "KVLocPlan", attributes=("bind",)),
    "bind_plan": Symbol("srt.mem_cache.kv_loc_plan", "KVLocPlan.bind", order=names("batch reader")),
    # worker
    "begin_decoding": Symbol(
        "srt.speculative.spec_info",
        "SpeculativeAlgorithm.build_disagg_draft_input",
        takes=names("batch last_tokens_tensor future_map"),
    ),
    "process_prebuilt": Symbol(
        "srt.disaggregation.decode_schedule_batch_mixin",
        "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt",
        calls=(
            "self.spec_algorithm.build_disagg_draft_input(self, last_tokens_tensor, future_map)",
        ),
    ),
    "worker_init": Symbol(
        "srt.speculative.dflash_worker_v2",
        "DFlashWorkerV2.__init__",
        takes=names("server_args gpu_id nccl_port target_worker"),
    ),
    "worker_forward": Symbol(
        "srt.speculative.dflash_worker_v2",
        "DFlashWorkerV2.forward_batch_generation",
        takes=names("batch on_publish grammar_barrier pp_proxy_tensors"),
    ),
    "build_draft_tp_worker": Symbol(
        "srt.speculative.draft_worker_common",
        "build_draft_tp_worker",
        names(
            """server_args gpu_id nccl_port target_model_config algo_label
            attention_backend_override"""
        ),
    ),
    "weight_update_runners": Symbol(
        "srt.speculative.base_spec_worker", "BaseSpecWorker.weight_update_runners", takes=()
    ),
    # weight updates
    **{
        f"scheduler_update_{source}": Symbol(
            WEIGHT_UPDATER,
            f"SchedulerWeightUpdaterManager.update_weights_from_{source}",
            takes=("recv_req",),
        )
        for source in ("disk", "tensor", "distributed", "ipc")
    },
    "scheduler_update_end": Symbol(
        WEIGHT_UPDATER, "SchedulerWeightUpdaterManager.end_weight_update", takes=("recv_req",)
    ),
    "SchedulerWeightUpdater": Symbol(
        WEIGHT_UPDATER,
        "SchedulerWeightUpdaterManager",
        attributes=names("draft_worker tp_worker _session"),
    ),
    **{
        f"answer_{source}": Symbol("srt.managers.io_struct", kind, names("success message"))
        for source, kind in (
            ("disk", "UpdateWeightFromDiskReqOutput"),
            ("tensor", "UpdateWeightsFromTensorReqOutput"),
            ("distributed", "UpdateWeightsFromDistributedReqOutput"),
            ("ipc", "UpdateWeightsFromIPCReqOutput"),
        )
    },
    # attention, layers, head
    "triton_verify_buffers": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend._update_target_verify_buffers",
        takes=names("plan bs seq_lens spec_info req_pool_indices"),
    ),
    "get_group_rank_size": Symbol(
        "srt.distributed.utils",
        "get_group_rank_size",
        order=("group",),
        returns=("(0, 1) if group is None else (group.rank_in_group, group.world_size)",),
    ),
    "sum_post_experts_output": Symbol(
        "srt.layers.moe.utils", "sum_post_experts_output", order=("hidden_states",)
    ),
    # each part of a layer is left to be summed
    "gemma4_parts": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer._next_stream",
        calls=(
            "self.ffn_boundary.sum_part(self.mlp(hidden_states), forward_batch, SumGroup.TP)",
            "self.ffn_boundary.sum_part(self.moe(hidden_states_2, router_logits), forward_batch, "
            "SumGroup.MOE_OUTPUT)",
        ),
    ),
    "capture_features": Symbol(
        "srt.layers.aux_hidden_states",
        "AuxHiddenStateList.capture",
        ("owned",),
        order=("hidden",),
    ),
    **{
        f"whole_{name}": Symbol("srt.layers.linear", name, ("parallel_group",))
        for name in names("QKVParallelLinear MergedColumnParallelLinear RowParallelLinear")
    },
    "draft_cell_size": Symbol(
        "srt.speculative.dflash_utils",
        "dflash_draft_cell_size_per_token",
        takes=names("draft_model_config draft_num_layers draft_kv_cache_dtype tp_size"),
    ),
    "draft_budget": Symbol(
        "srt.mem_cache.draft_kv_budget",
        "resolve_dflash_draft_cell_size",
        calls=(
            "dflash_draft_cell_size_per_token(draft_model_config=draft_model_config, "
            "draft_num_layers=draft_num_layers, draft_kv_cache_dtype=draft_kv_cache_dtype, "
            "tp_size=attn_tp_size)",
        ),
    ),
    "linear_group": Symbol(
        "srt.layers.linear", "_resolve_linear_group", order=("parallel_group",), returns=("None",)
    ),
    # the stream that `residual_is_written` leaves
    "gemma4_layer_result": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer.forward",
        ("capture_output",),
        returns=("self.ffn_boundary.finish(hidden_states, forward_batch)",),
    ),
    "gemma4_stages": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer.stage_facts",
        calls=(
            "declare_ffn(sparse=enable_moe_block, next_layer_sparse=enable_moe_block, "
            "update=REPLACE_AT_EXIT)",
        ),
    ),
    "residual_is_written": Symbol(
        "srt.layers.layer_boundary.residual.batch",
        "set_written",
        order=names("hidden_states forward_batch"),
    ),
    "stream_snapshot": Symbol(
        "srt.layers.layer_boundary.residual.batch",
        "snapshot",
        order=names("hidden_states forward_batch"),
    ),
    "compute_lm_head": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor._compute_lm_head",
        takes=names("hidden_states lm_head embedding_bias out"),
    ),
    # without a GPU
    "add_deterministic_choices": Symbol(
        "srt.server_args", "add_deterministic_attention_backend_choices", order=("iterable",)
    ),
    "add_radix_deterministic_choices": Symbol(
        "srt.server_args",
        "add_radix_supported_deterministic_attention_backend_choices",
        order=("iterable",),
    ),
    "gated_norm": Symbol(
        "kernels.ops.attention.fla.fused_norm_gate",
        "FusedRMSNormGated.forward",
        takes=names("x g residual prenorm residual_in_fp32"),
    ),
    "FusedRMSNormGated": Symbol(
        "kernels.ops.attention.fla.fused_norm_gate",
        "FusedRMSNormGated",
        attributes=names("weight eps activation"),
    ),
    "gated_layer_norm": Symbol(
        "kernels.ops.attention.fla.layernorm_gated", "RMSNorm.forward", takes=names("x z")
    ),
    "GatedLayerNorm": Symbol(
        "kernels.ops.attention.fla.layernorm_gated",
        "RMSNorm",
        attributes=names("weight eps activation group_size norm_before_gate"),
    ),
    "scatter_states": Symbol(
        "srt.layers.attention.hybrid_linear_attn_backend",
        "scatter_mamba_states_after_mtp_verify",
        order=names(
            """mamba_caches state_indices_tensor last_correct_step_indices mamba_track_indices
            mamba_steps_to_track"""
        ),
    ),
    "SpeculativeState": Symbol(
        "srt.mem_cache.memory_pool",
        "MambaPool.SpeculativeState",
        attributes=names("temporal conv intermediate_ssm intermediate_conv_window"),
    ),
    "track_states": Symbol(
        "srt.layers.attention.hybrid_linear_attn_backend",
        "track_mamba_states_all_layers",
        order=names(
            """conv_states_pool ssm_states_pool cache_indices mamba_track_mask
            mamba_track_indices"""
        ),
    ),
    "has_state_snapshots": Symbol(
        "srt.arg_groups.mamba_hook", "_platform_supports_mamba_cache_extra_buffer", takes=()
    ),
    "model_hook": Symbol("srt.arg_groups.model_hook", ""),
    "model_hook_backends": Symbol("srt.arg_groups.model_hook", "attention_backends_of"),
    "model_specific_adjustments": Symbol(
        "srt.arg_groups.model_hook",
        "handle_model_specific_adjustments",
        takes=("server_args",),
        calls=("attention_backends_of(resolved_view(server_args))",),
    ),
}
