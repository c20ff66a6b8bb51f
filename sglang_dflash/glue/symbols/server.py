"""Plug-in hooks, server arguments, the scheduler and its requests."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

# the server arguments that we read or set
SERVER_ARGS = """
    device pp_size page_size disaggregation_mode enable_linear_replayssm
    enable_linear_replayssm_spec enable_mixed_chunk max_running_requests
    disable_overlap_schedule speculative_draft_model_path speculative_draft_model_revision
    speculative_num_draft_tokens speculative_num_steps speculative_eagle_topk
    speculative_dflash_block_size speculative_draft_window_size
    speculative_draft_attention_backend speculative_draft_model_quantization
    speculative_accept_threshold_single speculative_accept_threshold_acc
    json_model_override_args trust_remote_code skip_tokenizer_init sampling_backend
    cuda_graph_max_bs_decode disable_prefill_cuda_graph enable_torch_compile enable_pdmux
    dcp_size enable_hierarchical_cache enable_memory_saver
    speculative_algorithm quantization min_free_slots_delay model_path host port attention_backend
    chunked_prefill_size enable_deterministic_inference enable_dp_attention grammar_backend
    decode_log_interval cuda_graph_config disable_cuda_graph_padding enable_two_batch_overlap
    enable_return_routed_experts enable_return_indexer_topk
    enable_lora tp_size nnodes dist_init_addr disaggregation_decode_enable_offload_kvcache
    kv_cache_dtype stream_interval
"""

SYMBOLS: dict[str, Symbol] = {
    # plug-in and arguments
    "HookRegistry": Symbol(
        "srt.plugins.hook_registry",
        "HookRegistry",
        attributes=names("register apply_hooks _patched"),
    ),
    "register_hook": Symbol(
        "srt.plugins.hook_registry",
        "HookRegistry.register",
        order=names("target hook hook_type"),
    ),
    "HookType": Symbol("srt.plugins.hook_registry", "HookType", attributes=("AROUND",)),
    "ServerArgs": Symbol(
        "srt.server_args",
        "ServerArgs",
        tuple(SERVER_ARGS.split()),
    ),
    "PhaseConfig": Symbol(
        "srt.model_executor.cuda_graph_config",
        "PhaseConfig",
        attributes=names("backend bs max_bs"),
    ),
    "GraphBackend": Symbol(
        "srt.model_executor.cuda_graph_config", "Backend", attributes=("DISABLED",)
    ),
    "Engine": Symbol("srt.entrypoints.engine", "Engine", attributes=names("generate shutdown")),
    "resolved_view": Symbol("srt.arg_groups.overrides", "resolved_view", order=("server_args",)),
    "attention_backends_of": Symbol(
        "srt.arg_groups.overrides",
        "attention_backends_of",
        order=("cfg",),
        returns=("(prefill, decode)",),
    ),
    "get_config": Symbol(
        "srt.utils.hf_transformers_utils",
        "get_config",
        names("trust_remote_code revision model_override_args"),
        order=("model",),
    ),
    "get_context_length": Symbol(
        "srt.utils.hf_transformers.common", "get_context_length", order=("config",)
    ),
    "parse_config": Symbol(
        "srt.utils.hf_transformers.config",
        "HfModelConfigParser.parse",
        ("revision",),
        order=names("model trust_remote_code"),
    ),
    "get_rope_config": Symbol(
        "srt.utils.hf_transformers_utils", "get_rope_config", order=("config",)
    ),
    "mambaish_config": Symbol(
        "srt.configs.hybrid_arch", "mambaish_config", order=("model_config",)
    ),
    "mamba_state_dtype": Symbol("srt.configs.mamba_utils", "mamba2_state_dtype"),
    "MambaStateDType": Symbol("srt.configs.mamba_utils", "Mamba2StateDType", attributes=("conv",)),
    "get_linear_attn_config": Symbol(
        "srt.configs.linear_attn_model_registry", "get_linear_attn_config", order=("hf_config",)
    ),
    "ModelConfig": Symbol(
        "srt.configs.model_config",
        "ModelConfig",
        attributes=names(
            """hf_config hf_text_config model_path num_attention_heads num_key_value_heads
            context_len vocab_size dtype model_is_mrope get_total_num_kv_heads"""
        ),
    ),
    "get_server_args": Symbol("srt.runtime_context", "get_server_args"),
    "get_parallel": Symbol("srt.runtime_context", "get_parallel"),
    "ParallelContext": Symbol(
        "srt.runtime_context", "ParallelContext", attributes=("attn_tp_size",)
    ),
    # functions that the plug-in hooks
    "create_worker": Symbol(
        "srt.speculative.spec_info", "SpeculativeAlgorithm.create_worker", takes=("server_args",)
    ),
    "prepare_server_args": Symbol("srt.server_args", "prepare_server_args", takes=("argv",)),
    "handle_dflash": Symbol(
        "srt.arg_groups.speculative_hook", "_handle_dflash", takes=("server_args",)
    ),
    "resolve_alias": Symbol(
        "srt.arg_groups.speculative_hook",
        "_resolve_speculative_algorithm_alias",
        order=("speculative_algorithm",),
    ),
    "meet_ranks": Symbol(
        "srt.distributed.bootstrap",
        "init_distributed_environment",
        names("world_size distributed_init_method timeout"),
    ),
    "validate_request": Symbol(
        "srt.speculative.dflash_utils",
        "validate_dflash_request",
        takes=names("req enable_overlap"),
    ),
    "update_finish_state": Symbol(
        "srt.managers.schedule_batch", "Req.update_finish_state", takes=("new_accepted_len",)
    ),
    "configure_capture": Symbol(
        "srt.model_executor.model_runner_components.attention_backend_setup",
        "configure_aux_hidden_state_capture",
        names("model dflash_use_aux_hidden_state dflash_target_layer_ids"),
    ),
    "internal_state": Symbol(
        "srt.managers.scheduler", "Scheduler.get_internal_state", takes=("recv_req",)
    ),
    "run_event_loop": Symbol("srt.managers.scheduler", "Scheduler.run_event_loop", takes=()),
    "spec_metrics": Symbol(
        "srt.managers.tokenizer_manager",
        "TokenizerManager._calculate_spec_decoding_metrics",
        takes=names("meta_info recv_obj i"),
    ),
    # arguments of the hooks: the scheduler, requests, pools to size, responses
    "Scheduler": Symbol(
        "srt.managers.scheduler",
        "Scheduler",
        attributes=names(
            """chunked_req draft_worker enable_overlap last_batch metrics_collector metrics_reporter
            result_queue running_batch server_args spec_algorithm token_to_kv_pool_allocator
            is_fully_idle flush_cache process_batch_result"""
        ),
    ),
    "flush_cache": Symbol("srt.managers.scheduler", "Scheduler.flush_cache", ("empty_cache",)),
    "process_batch_result": Symbol(
        "srt.managers.scheduler", "Scheduler.process_batch_result", order=names("batch result")
    ),
    "MetricsReporter": Symbol(
        "srt.managers.scheduler_components.metrics_reporter",
        "SchedulerMetricsReporter",
        attributes=names("current_scheduler_metrics_enabled is_stats_logging_rank"),
    ),
    "MetricsCollector": Symbol(
        "srt.observability.metrics_collector", "SchedulerMetricsCollector", attributes=("labels",)
    ),
    "TokenizerManager": Symbol(
        "srt.managers.tokenizer_manager", "TokenizerManager", attributes=("server_args",)
    ),
    "GetInternalStateReqOutput": Symbol(
        "srt.managers.io_struct", "GetInternalStateReqOutput", attributes=("internal_state",)
    ),
    "answers": Symbol(
        "srt.managers.io_struct", "BatchTokenIDOutput", attributes=("completion_tokens",)
    ),
    "answers_of_text": Symbol(
        "srt.managers.io_struct", "BatchStrOutput", attributes=("completion_tokens",)
    ),
    "Req": Symbol(
        "srt.managers.schedule_batch",
        "Req",
        attributes=names(
            """custom_logit_processor decode_batch_idx finished finished_len grammar input_embeds kv
            origin_input_ids output_ids return_hidden_states rid
            sampling_params seqlen spec_num_cap_tokens spec_num_correct_drafts stream
            spec_correct_drafts_histogram spec_verify_ct to_finish tokenizer
            update_spec_correct_drafts_histogram"""
        ),
    ),
    "count_correct_drafts": Symbol(
        "srt.managers.schedule_batch",
        "Req.update_spec_correct_drafts_histogram",
        order=("num_correct_drafts",),
    ),
    "ReqKvInfo": Symbol(
        "srt.managers.schedule_batch",
        "ReqKvInfo",
        attributes=("kv_allocated_len",),
    ),
    "SamplingParams": Symbol(
        "srt.sampling.sampling_params",
        "SamplingParams",
        attributes=names(
            """ebnf frequency_penalty json_schema max_new_tokens min_new_tokens min_p
            presence_penalty regex repetition_penalty stop_regex_strs stop_strs stop_token_ids
            stream_interval structural_tag top_k top_p"""
        ),
    ),
    # prefill and decode apart
    "back_up_kv": Symbol(
        "srt.managers.schedule_batch",
        "Req.offload_kv_cache",
        takes=names("req_to_token_pool token_to_kv_pool_allocator"),
    ),
    "restore_kv": Symbol(
        "srt.managers.schedule_batch",
        "Req.load_kv_cache",
        takes=names("req_to_token_pool token_to_kv_pool_allocator"),
    ),
    "FutureMap": Symbol(
        "srt.managers.overlap_utils", "FutureMap", attributes=names("publish stash")
    ),
    "publish_lens": Symbol(
        "srt.managers.overlap_utils",
        "FutureMap.publish",
        order=names("future_indices new_seq_lens"),
    ),
    "stash_tokens": Symbol(
        "srt.managers.overlap_utils", "FutureMap.stash", order=names("future_indices payload")
    ),
    "RelayPayload": Symbol("srt.managers.overlap_utils", "RelayPayload", ("bonus_tokens",)),
    "KVManager": Symbol(
        "srt.disaggregation.common.conn",
        "CommonKVManager",
        attributes=names("attn_tp_size is_mla_backend kv_args"),
    ),
    "match_ranks": Symbol(
        "srt.disaggregation.common.conn",
        "CommonKVManager._resolve_rank_mapping",
        takes=("info",),
    ),
    "PrefillServerInfo": Symbol(
        "srt.disaggregation.common.conn", "PrefillServerInfo", attributes=("attn_tp_size",)
    ),
    "KVArgs": Symbol("srt.disaggregation.base.conn", "KVArgs", attributes=("kv_item_lens",)),
    # weight updates
    "join_update_group": Symbol(
        "srt.managers.tp_worker",
        "TpModelWorker.init_weights_update_group",
        takes=("recv_req",),
        returns=("(success, message)",),
    ),
    **{
        f"request_{source}": Symbol(
            "srt.managers.io_struct", kind, attributes=names("flush_cache torch_empty_cache")
        )
        for source, kind in (
            ("disk", "UpdateWeightFromDiskReqInput"),
            ("tensor", "UpdateWeightsFromTensorReqInput"),
            ("distributed", "UpdateWeightsFromDistributedReqInput"),
            ("ipc", "UpdateWeightsFromIPCReqInput"),
        )
    },
}
