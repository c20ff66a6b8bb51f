"""Layers that the drafter uses, and target parts that we replace: attention, layers, head."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

SYMBOLS: dict[str, Symbol] = {
    # draft model
    "ModelRegistry": Symbol("srt.models.registry", "ModelRegistry"),
    "ModelRegistry_kind": Symbol(
        "srt.models.registry", "_ModelRegistry", attributes=names("models resolve_model_cls")
    ),
    "resolve_model_cls": Symbol(
        "srt.models.registry", "_ModelRegistry.resolve_model_cls", returns=("(model_cls, arch)",)
    ),
    "default_weight_loader": Symbol(
        "srt.model_loader.weight_utils",
        "default_weight_loader",
        order=names("param loaded_weight"),
    ),
    "RMSNorm": Symbol(
        "srt.layers.layernorm",
        "RMSNorm",
        ("eps",),
        attributes=names("weight variance_epsilon"),
        order=("hidden_size",),
    ),
    "SiluAndMul": Symbol("srt.layers.activation", "SiluAndMul"),
    "QKVParallelLinear": Symbol(
        "srt.layers.linear",
        "QKVParallelLinear",
        names("hidden_size head_size total_num_heads total_num_kv_heads bias quant_config prefix"),
    ),
    "RowParallelLinear": Symbol(
        "srt.layers.linear",
        "RowParallelLinear",
        names("bias quant_config prefix"),
        attributes=("quant_method",),
        order=names("input_size output_size"),
    ),
    "MergedColumnParallelLinear": Symbol(
        "srt.layers.linear",
        "MergedColumnParallelLinear",
        names("bias quant_config prefix"),
        attributes=("quant_method",),
        order=names("input_size output_sizes"),
    ),
    # a product comes with the bias that is left to add
    "row_parallel_forward": Symbol(
        "srt.layers.linear",
        "RowParallelLinear.forward",
        ("skip_all_reduce",),
        returns=("(output, output_bias)",),
    ),
    "column_parallel_forward": Symbol(
        "srt.layers.linear", "ColumnParallelLinear.forward", returns=("(output, output_bias)",)
    ),
    "norm_forward": Symbol(
        "srt.layers.layernorm", "RMSNorm.forward_native", returns=names("x") + ("(x, residual)",)
    ),
    "get_rope": Symbol(
        "srt.layers.rotary_embedding",
        "get_rope",
        names("rotary_dim max_position base rope_scaling"),
        order=("head_size",),
    ),
    "RotaryEmbedding": Symbol(
        "srt.layers.rotary_embedding.base", "RotaryEmbedding", attributes=("cos_sin_cache",)
    ),
    "rotary_forward": Symbol(
        "srt.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_native",
        order=names("positions query key"),
        returns=("(query, key)",),
    ),
    "RadixAttention": Symbol(
        "srt.layers.radix_attention",
        "RadixAttention",
        names("""num_heads head_dim scaling num_kv_heads layer_id sliding_window_size attn_type"""),
        attributes=names(
            """attn_type is_cross_attention k_scale k_scale_float layer_id logit_cap
            logit_capping_method qk_head_dim scaling sliding_window_size tp_k_head_num
            tp_q_head_num v_head_dim v_scale v_scale_float xai_temperature_len"""
        ),
    ),
    "attend": Symbol(
        "srt.layers.radix_attention",
        "RadixAttention.forward",
        order=names("q k v forward_batch"),
    ),
    "AttentionType": Symbol(
        "srt.layers.radix_attention",
        "AttentionType",
        attributes=names("DECODER DECODER_BIDIRECTIONAL ENCODER_ONLY"),
    ),
    # attention
    "TritonAttnBackend": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend",
        # read to choose a kernel, or written, which would not fail if they were gone
        attributes=names(
            """enable_deterministic dcp_size use_sliding_window_kv_pool
            cuda_graph_swa_out_cache_loc _verify_mask allow_bidirectional_attention_in_extend
            cuda_graph_kv_indices cuda_graph_window_kv_indices cuda_graph_window_kv_offsets device
            forward_extend forward_metadata init_cuda_graph_state kv_indptr max_context_len
            qo_indptr req_to_token sliding_window_size token_to_kv_pool use_mla
            window_kv_indptr"""
        ),
    ),
    "TritonMetadata": Symbol(
        "srt.layers.attention.triton_backend",
        "ForwardMetadata",
        attributes=names(
            "kv_indices kv_indptr qo_indptr swa_out_cache_loc window_kv_indices window_kv_indptr"
        ),
    ),
    "logit_capping_mod": Symbol(
        "srt.layers.attention.triton_backend",
        "logit_capping_mod",
        order=names("logit_capping_method logit_cap"),
    ),
    "triton_forward_extend": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend.forward_extend",
        order=names("q k v layer forward_batch save_kv_cache sinks"),
    ),
    "triton_graph_state": Symbol(
        "srt.layers.attention.triton_backend",
        "TritonAttnBackend.init_cuda_graph_state",
        order=names("max_bs max_num_tokens"),
    ),
    "HybridLinearAttnBackend": Symbol(
        "srt.layers.attention.hybrid_linear_attn_backend",
        "HybridLinearAttnBackend",
        attributes=("full_attn_backend",),
    ),
    "advance_states": Symbol(
        "srt.layers.attention.hybrid_linear_attn_backend",
        "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        names(
            """last_correct_step_indices mamba_track_indices mamba_steps_to_track model
            req_pool_indices"""
        ),
    ),
    "FlashAttentionBackend": Symbol(
        "srt.layers.attention.flashattention_backend", "FlashAttentionBackend"
    ),
    "flash_plan_in_graph": Symbol(
        "srt.layers.attention.flashattention_backend",
        "FlashAttentionBackend.init_forward_metadata_in_graph",
        takes=("forward_batch",),
    ),
    "flash_plan_out_graph": Symbol(
        "srt.layers.attention.flashattention_backend",
        "FlashAttentionBackend.init_forward_metadata_out_graph",
        takes=names("forward_batch in_capture"),
    ),
    # layers
    "BaseLayerWithLoRA": Symbol("srt.lora.layers", "BaseLayerWithLoRA", attributes=("base_layer",)),
    "Gemma4DecoderLayer": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer",
        attributes=names(
            """enable_moe_block has_ple input_layernorm layer_scalar mlp moe
            post_attention_layernorm post_feedforward_layernorm post_feedforward_layernorm_1
            post_feedforward_layernorm_2 pre_feedforward_layernorm pre_feedforward_layernorm_2
            router self_attn"""
        ),
    ),
    "gemma4_layer": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4DecoderLayer.forward",
        order=names("positions hidden_states per_layer_input forward_batch"),
    ),
    "Gemma4Attention": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4Attention",
        attributes=names(
            """attn head_dim is_kv_shared_layer k_norm num_heads num_kv_heads o_proj q_norm qkv_proj
            rotary_emb v_norm"""
        ),
    ),
    "Gemma4MLP": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4MLP",
        attributes=names("act_fn down_proj gate_up_proj"),
    ),
    "Gemma4Router": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4Router",
        attributes=names("_scale_fused fuse_scale norm proj"),
    ),
    "Gemma4MoE": Symbol(
        "srt.models.gemma4_causal",
        "Gemma4MoE.forward",
        order=names("hidden_states router_logits"),
    ),
    "Gemma4RMSNorm": Symbol(
        "srt.layers.layernorm",
        "Gemma4RMSNorm",
        attributes=names("eps scale_shift weight with_scale"),
    ),
    # head
    "LogitsProcessor": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor",
        attributes=names(
            """_compute_lm_head _gather_attn_tp_logits _get_logits _logits_gatherer
            do_tensor_parallel_all_gather do_tensor_parallel_all_gather_dp_attn
            final_logit_softcapping logit_scale rl_on_policy_target use_attn_tp_group
            use_fp32_lm_head vocab_size"""
        ),
    ),
    "process_logits": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor.forward",
        ("aux_hidden_states",),
        order=names("input_ids hidden_states lm_head logits_metadata"),
    ),
    "LogitsMetadata": Symbol(
        "srt.layers.logits_processor",
        "LogitsMetadata",
        attributes=names("forward_mode next_token_logits_buffer"),
    ),
    "get_logits": Symbol(
        "srt.layers.logits_processor",
        "LogitsProcessor._get_logits",
        order=names("hidden_states lm_head logits_metadata embedding_bias"),
    ),
    "VocabParallelEmbedding": Symbol(
        "srt.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding",
        attributes=names("shard_indices quant_method"),
    ),
    "ShardIndices": Symbol(
        "srt.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        attributes=names("org_vocab_start_index num_org_elements"),
    ),
    "fused_softcap": Symbol(
        "srt.layers.logits_processor",
        "fused_softcap",
        order=names("full_logits final_logit_softcapping"),
    ),
}
