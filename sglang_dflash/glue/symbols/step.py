"""The worker, and the objects of a step: batches, runners, memory, sampling."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

SYMBOLS: dict[str, Symbol] = {
    # worker
    "BaseSpecWorker": Symbol(
        "srt.speculative.base_spec_worker",
        "BaseSpecWorker",
        attributes=names("alloc_memory_pool init_attention_backends init_cuda_graphs"),
    ),
    "alloc_memory_pool": Symbol(
        "srt.speculative.base_spec_worker",
        "BaseSpecWorker.alloc_memory_pool",
        takes=names("memory_pool_config req_to_token_pool token_to_kv_pool_allocator"),
    ),
    "on_verify_complete_cpu": Symbol(
        "srt.speculative.base_spec_worker",
        "BaseSpecWorker.on_verify_complete_cpu",
        takes=names("num_correct_drafts_per_req batch_size"),
    ),
    # arguments that the scheduler passes to the worker that ours replaces
    "SpeculativeAlgorithm": Symbol(
        "srt.speculative.spec_info",
        "SpeculativeAlgorithm",
        attributes=names("DFLASH NONE is_dflash"),
    ),
    "SpecInput": Symbol("srt.speculative.spec_info", "SpecInput", order=("spec_input_type",)),
    "SpecInputType": Symbol(
        "srt.speculative.spec_info", "SpecInputType", attributes=("DFLASH_DRAFT",)
    ),
    "DFlashVerifyInput": Symbol(
        "srt.speculative.dflash_info",
        "DFlashVerifyInput",
        names(
            """draft_token positions draft_token_num custom_mask capture_hidden_mode
            ragged_verify_layout"""
        ),
    ),
    "prepare_for_verify": Symbol(
        "srt.speculative.dflash_info",
        "DFlashVerifyInput.prepare_for_verify",
        order=names("batch target_worker"),
        returns=("(verify_forward_batch, can_run_cuda_graph)",),
    ),
    "DraftWorkerBundle": Symbol(
        "srt.speculative.draft_worker_common",
        "DraftWorkerBundle",
        attributes=names("draft_worker draft_model_runner"),
    ),
    "GenerationBatchResult": Symbol(
        "srt.managers.utils",
        "GenerationBatchResult",
        names(
            """logits_output next_token_ids accept_lens next_draft_input can_run_cuda_graph
            speculative_num_draft_tokens new_seq_lens extra_keep_alive_refs
            routed_experts_output indexer_topk_output"""
        ),
    ),
    "TpModelWorker": Symbol(
        "srt.managers.tp_worker", "TpModelWorker", attributes=names("device model_runner")
    ),
    "target_forward": Symbol(
        "srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        names("forward_batch is_verify capture_hidden_mode skip_attn_backend_init"),
        order=("batch",),
    ),
    # runners
    "ModelRunner": Symbol(
        "srt.model_executor.model_runner",
        "ModelRunner",
        attributes=names(
            """attn_backend capture_tail_hooks check_weights decode_cuda_graph_runner device dtype
            forward model model_config req_to_token_pool sampler server_args spec_algorithm
            token_to_kv_pool _decode_cuda_graph_runner_cls"""
        ),
    ),
    "runner_forward": Symbol(
        "srt.model_executor.model_runner", "ModelRunner.forward", order=("forward_batch",)
    ),
    "ModelRunnerOutput": Symbol(
        "srt.model_executor.model_runner",
        "ModelRunnerOutput",
        attributes=names("logits_output can_run_graph"),
    ),
    "DecodeCudaGraphRunner": Symbol(
        "srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner",
        attributes=names(
            """attn_backend backend buffers capture_bs capture_num_tokens captured_req_width max_bs
            max_num_token ragged_verify_mode _make_graph_key"""
        ),
        calls=("capture_hook(self, out, forward_batch, num_tokens)",),
    ),
    # methods that the runner of our verify graphs overrides
    **{
        name: Symbol(
            "srt.model_executor.runner.decode_cuda_graph_runner",
            f"DecodeCudaGraphRunner.{name}",
            takes=takes,
        )
        for name, takes in {
            "_autotune_buffers": (),
            "_ragged_capture_slots": ("num_tokens",),
            "_capture_ragged_verify_layout": ("num_tokens",),
            "_stage_ragged_verify_layout": names("ragged_layout graph_size_key"),
            "_can_run_ragged_verify_graph": names("forward_batch ragged_layout"),
        }.items()
    },
    "graph_key": Symbol(
        "srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner._make_graph_key",
        order=("size",),
    ),
    "graph_replay": Symbol(
        "srt.model_executor.runner_backend.full_cuda_graph_backend",
        "FullCudaGraphBackend.replay",
        order=names("shape_key static_forward_batch"),
    ),
    "DecodeInputBuffers": Symbol(
        "srt.model_executor.runner_utils.buffers",
        "DecodeInputBuffers",
        attributes=names("seq_lens req_pool_indices"),
    ),
    "get_tp_group": Symbol("srt.distributed", "get_tp_group"),
    "get_world_group": Symbol("srt.distributed.parallel_state", "get_world_group"),
    "GroupCoordinator": Symbol(
        "srt.distributed.parallel_state",
        "GroupCoordinator",
        attributes=names(
            """all_gather all_gather_object all_reduce broadcast broadcast_object cpu_group
            rank_in_group world_size"""
        ),
    ),
    "broadcast": Symbol(
        "srt.distributed.parallel_state", "GroupCoordinator.broadcast", order=names("input_")
    ),
    "broadcast_object": Symbol(
        "srt.distributed.parallel_state", "GroupCoordinator.broadcast_object", order=names("obj")
    ),
    "all_gather_object": Symbol(
        "srt.distributed.parallel_state", "GroupCoordinator.all_gather_object", order=names("obj")
    ),
    "all_reduce": Symbol(
        "srt.distributed.parallel_state", "GroupCoordinator.all_reduce", order=names("input_")
    ),
    "all_gather": Symbol(
        "srt.distributed.parallel_state", "GroupCoordinator.all_gather", order=names("input_ dim")
    ),
    # batches
    "ScheduleBatch": Symbol(
        "srt.managers.schedule_batch",
        "ScheduleBatch",
        attributes=names(
            """batch_is_full device enable_overlap extend_lens forward_mode has_grammar
            input_embeds input_ids mamba_track_indices out_cache_loc prefix_lens req_pool_indices
            req_to_token_pool reqs return_logprob sampling_info seq_lens seq_lens_cpu seq_lens_sum
            spec_info token_ids_logprobs token_to_kv_pool_allocator top_logprobs_nums tree_cache
            filter_batch maybe_evict_swa"""
        ),
    ),
    "maybe_evict_swa": Symbol(
        "srt.managers.schedule_batch", "ScheduleBatch.maybe_evict_swa", takes=()
    ),
    "ForwardBatch": Symbol(
        "srt.model_executor.forward_batch_info",
        "ForwardBatch",
        names(
            """forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc
            seq_lens_sum seq_lens_cpu positions spec_algorithm spec_info capture_hidden_mode
            extend_seq_lens extend_prefix_lens"""
        ),
    ),
    "ForwardMode": Symbol(
        "srt.model_executor.forward_batch_info",
        "ForwardMode",
        attributes=names("TARGET_VERIFY is_decode is_extend is_target_verify"),
    ),
    "CaptureHiddenMode": Symbol(
        "srt.model_executor.forward_batch_info",
        "CaptureHiddenMode",
        attributes=names("FULL NULL"),
    ),
    # memory
    "alloc_for_spec_decode": Symbol(
        "srt.mem_cache.allocation",
        "alloc_for_spec_decode",
        names(
            """reqs req_pool_indices cur_kv_lens cur_kv_lens_cpu nxt_kv_lens nxt_kv_lens_cpu
            num_needed_tokens batch"""
        ),
        order=names("tree_cache req_to_token_pool"),
    ),
    "ReqToTokenPool": Symbol(
        "srt.mem_cache.memory_pool", "ReqToTokenPool", attributes=names("req_to_token size")
    ),
    "allocator": Symbol(
        "srt.mem_cache.allocator.base",
        "BaseTokenToKVPoolAllocator",
        attributes=names("page_size available_size"),
    ),
    "BasePrefixCache": Symbol(
        "srt.mem_cache.base_prefix_cache", "BasePrefixCache", attributes=("supports_swa",)
    ),
    "KVWriteLoc": Symbol("srt.mem_cache.memory_pool", "KVWriteLoc", order=names("loc swa_loc")),
    "MHATokenToKVPool": Symbol(
        "srt.mem_cache.memory_pool",
        "MHATokenToKVPool",
        attributes=names(
            """get_cpu_copy get_key_buffer get_kv_buffer get_value_buffer load_cpu_copy
            set_kv_buffer"""
        ),
    ),
    "SWAKVPool": Symbol(
        "srt.mem_cache.swa_memory_pool",
        "SWAKVPool",
        attributes=names(
            """full_to_swa_index_mapping translate_loc_from_full_to_swa layers_mapping
            get_key_buffer get_value_buffer get_kv_buffer set_kv_buffer"""
        ),
    ),
    **{
        f"{kind}_write": Symbol(
            module, f"{kind}.set_kv_buffer", order=names("layer loc_info cache_k cache_v k_scale")
        )
        for module, kind in (
            ("srt.mem_cache.memory_pool", "MHATokenToKVPool"),
            ("srt.mem_cache.swa_memory_pool", "SWAKVPool"),
        )
    },
    # sampling
    "SamplingBatchInfo": Symbol(
        "srt.sampling.sampling_batch_info",
        "SamplingBatchInfo",
        names("temperatures top_ps top_ks min_ps is_all_greedy sampling_seed"),
        attributes=names(
            """logit_bias has_custom_logit_processor need_min_p_sampling return_sampling_masks
            vocab_size"""
        ),
    ),
    "Sampler_forward": Symbol(
        "srt.layers.sampler",
        "Sampler.forward",
        order=names(
            """logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs
            positions"""
        ),
        returns=("batch_next_token_ids",),
    ),
    "LogitsProcessorOutput": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessorOutput",
        names("next_token_logits hidden_states next_token_logprobs"),
    ),
    "GrammarMask": Symbol(
        "srt.constrained.base_grammar_backend",
        "GrammarMask",
        attributes=("apply",),
        order=names("grammar vocab_mask"),
    ),
    "BaseGrammarObject": Symbol(
        "srt.constrained.base_grammar_backend",
        "BaseGrammarObject",
        attributes=names(
            """accept_token allocate_vocab_mask fill_vocab_mask finished is_terminated
            move_vocab_mask rollback"""
        ),
    ),
    "allocate_vocab_mask": Symbol(
        "srt.constrained.base_grammar_backend",
        "BaseGrammarObject.allocate_vocab_mask",
        names("vocab_size batch_size device"),
    ),
    "fill_vocab_mask": Symbol(
        "srt.constrained.base_grammar_backend",
        "BaseGrammarObject.fill_vocab_mask",
        order=names("vocab_mask idx"),
    ),
    "move_vocab_mask": Symbol(
        "srt.constrained.base_grammar_backend",
        "BaseGrammarObject.move_vocab_mask",
        order=names("vocab_mask device"),
    ),
    "apply_custom_logit_processor": Symbol(
        "srt.layers.sampler",
        "apply_custom_logit_processor",
        order=names("logits sampling_batch_info"),
    ),
}
