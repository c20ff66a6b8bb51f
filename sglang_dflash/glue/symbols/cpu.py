"""The symbols that `glue/cpu` replaces or uses."""

from __future__ import annotations

from sglang_dflash.glue.contract import Symbol, names

SYMBOLS: dict[str, Symbol] = {
    # sampling
    "batch_invariant_mode": Symbol(
        "srt.model_executor.model_runner", "ModelRunner.maybe_enable_batch_invariant_mode", takes=()
    ),
    "murmur_hash32": Symbol(
        "srt.layers.sampler", "murmur_hash32", takes=names("seed positions col_indices")
    ),
    "allocate_token_bitmask": Symbol(
        "srt.constrained.xgrammar_backend",
        "_allocate_token_bitmask",
        takes=names("vocab_size batch_size"),
    ),
    "apply_vocab_mask": Symbol(
        "srt.constrained.xgrammar_backend",
        "XGrammarGrammar.apply_vocab_mask",
        takes=names("logits vocab_mask"),
    ),
    # GEMMs and experts
    "unquantized_linear": Symbol(
        "srt.layers.quantization.unquant",
        "UnquantizedLinearMethod.apply",
        takes=names("layer x bias"),
    ),
    "unquantized_experts": Symbol(
        "srt.layers.quantization.unquant",
        "UnquantizedFusedMoEMethod.forward_native",
        takes=names("layer dispatch_output"),
    ),
    "UnquantizedFusedMoEMethod": Symbol(
        "srt.layers.quantization.unquant",
        "UnquantizedFusedMoEMethod",
        attributes=("moe_runner_config",),
    ),
    "StandardDispatchOutput": Symbol(
        "srt.layers.moe.token_dispatcher",
        "StandardDispatchOutput",
        attributes=names("hidden_states topk_output"),
    ),
    "moe_forward_native": Symbol(
        "srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        order=names("layer x topk_output moe_runner_config"),
    ),
    "StandardTopKOutput": Symbol(
        "srt.layers.moe.topk",
        "StandardTopKOutput",
        names("topk_weights topk_ids router_logits"),
    ),
    "FusedMoE": Symbol(
        "srt.layers.moe.fused_moe_triton.layer", "FusedMoE", attributes=("moe_ep_size",)
    ),
    "StandardCombineInput": Symbol(
        "srt.layers.moe.token_dispatcher", "StandardCombineInput", ("hidden_states",)
    ),
    "add_shared_expert": Symbol(
        "srt.models.qwen2_moe",
        "fused_gate_sigmoid_mul_add",
        takes=names("hidden_states gate_weight shared_output final_hidden_states"),
    ),
    # norms
    "gemma4_norm": Symbol("srt.layers.layernorm", "Gemma4RMSNorm.forward_native", takes=("x",)),
    "minimax_squares": Symbol("srt.models.minimax_m2", "rms_sumsq_serial", takes=names("x1 x2")),
    "minimax_norm": Symbol(
        "srt.models.minimax_m2",
        "rms_apply_serial",
        takes=names("x1 x2 w1 w2 sum_sq tp_world eps"),
    ),
    # quantised weights
    "compressed_dtypes": Symbol(
        "srt.layers.quantization.compressed_tensors.compressed_tensors",
        "CompressedTensorsConfig.get_supported_act_dtypes",
        takes=(),
    ),
    "awq_dtypes": Symbol(
        "srt.layers.quantization.awq.awq", "AWQConfig.get_supported_act_dtypes", takes=()
    ),
    "compressed_scheme_supported": Symbol(
        "srt.layers.quantization.compressed_tensors.compressed_tensors",
        "CompressedTensorsConfig._check_scheme_supported",
        takes=names("min_capability error"),
    ),
    "compressed_process": Symbol(
        "srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16",
        "CompressedTensorsWNA16.process_weights_after_loading",
        takes=("layer",),
    ),
    "compressed_multiply": Symbol(
        "srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16",
        "CompressedTensorsWNA16.apply_weights",
        takes=names("layer x bias"),
    ),
    "CompressedTensorsWNA16": Symbol(
        "srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16",
        "CompressedTensorsWNA16",
        attributes=names("has_g_idx pack_factor symmetric"),
    ),
    "compressed_weights": Symbol(
        "srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16",
        "CompressedTensorsWNA16.create_weights",
        calls=(
            "layer.register_parameter('weight_packed', weight)",
            "layer.register_parameter('weight_scale', weight_scale)",
            "layer.register_parameter('weight_zero_point', qzeros)",
        ),
    ),
    "awq_weights": Symbol(
        "srt.layers.quantization.awq.schemes.awq_linear",
        "AWQLinearScheme.create_weights",
        calls=(
            "layer.register_parameter('qweight', qweight)",
            "layer.register_parameter('qzeros', qzeros)",
            "layer.register_parameter('scales', scales)",
        ),
    ),
    "awq_process": Symbol(
        "srt.hardware_backend.gpu.quantization.awq_kernels",
        "AWQLinearKernel.process_weights_after_loading",
        takes=("layer",),
    ),
    "awq_multiply": Symbol(
        "srt.hardware_backend.gpu.quantization.awq_kernels",
        "AWQLinearKernel.apply",
        takes=names("layer x bias"),
    ),
    # attention
    "AttentionBackend": Symbol("srt.layers.attention.base_attn_backend", "AttentionBackend"),
    "register_attention_backend": Symbol(
        "srt.layers.attention.attention_registry", "register_attention_backend", order=("name",)
    ),
    # processes and sizes
    "set_envs_and_config": Symbol(
        "srt.entrypoints.engine", "_set_envs_and_config", takes=("server_args",)
    ),
    "find_nccl_library": Symbol(
        "srt.distributed.device_communicators.pynccl_wrapper", "find_nccl_library", takes=()
    ),
    "init_cpu_threads": Symbol("srt.distributed.bootstrap", "_init_cpu_threads_env"),
    "update_intermediate_size": Symbol(
        "srt.configs.update_config",
        "update_intermediate_size",
        takes=names("model_config attr_name intermediate_padding_size"),
    ),
}
