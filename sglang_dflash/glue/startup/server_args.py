"""The arguments of a DFLASH server: defaults filled in, unsupported ones refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import config as cfg
from sglang_dflash import draft_backends, fp8_drafter
from sglang_dflash.draft_backends import Place, choose_draft_backend
from sglang_dflash.environment import (
    DETERMINISTIC_PREFILL_ALIGN,
    LONGER_CONTEXTS,
    Environment,
)
from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.startup import width_args
from sglang_dflash.glue.startup.feature_capture import captures_itself, keep_hooks_out_of_graphs
from sglang_dflash.glue.startup.recurrent_targets import (
    refuse_other_states,
    refuse_release,
    refuse_unknown_states,
)
from sglang_dflash.kernels import cards

logger = logging.getLogger(__name__)

ARGS = changes.Settings(
    "ServerArgs",
    {
        "speculative_num_draft_tokens": "the block size, from the drafter or the user",
        "speculative_num_steps": "a block is drafted in one step",
        "speculative_eagle_topk": "a block is one chain",
        "speculative_draft_attention_backend": "a backend that supports this drafter's layers",
        "speculative_draft_model_quantization": "--quantization applies to the target only",
        "min_free_slots_delay": "a request is admitted as soon as one slot is free",
        "disable_overlap_schedule": "our switches control overlap scheduling",
    },
)


def handle_dflash(server_args: Any) -> None:
    """Check and complete the arguments of a DFLASH server, in place of SGLang's own handler."""
    server_args = seams.settings(server_args)
    Environment().check()
    _refuse_unsupported(server_args)
    _refuse_endless_wait(server_args)
    _refuse_unreadable_cache(server_args)
    # before SGLang uses it, so that every field is checked
    draft_config = _drafter_config(server_args)
    drafter = cfg.DrafterSpec.from_config(
        draft_config.to_dict(), name=server_args.speculative_draft_model_path
    )
    target_config = seams.model_config(server_args)
    target = target_spec(target_config)
    keep_hooks_out_of_graphs(server_args, target.architecture)
    refuse_other_states(server_args, target_config)
    cfg.check_pair(drafter, target)
    _refuse_short_drafter(draft_config, drafter, target)
    folder = Path(server_args.speculative_draft_model_path)
    if folder.is_dir():
        cfg.check_features(drafter, folder, target=target)

    block_size = cfg.resolve_block_size(drafter, _asked_block_size(server_args))
    ARGS.write(server_args, speculative_num_draft_tokens=block_size)
    ARGS.write(server_args, speculative_num_steps=1, speculative_eagle_topk=1)
    _choose_draft_backend(server_args, drafter, dtype=target_config.dtype)
    _quantise_drafter(server_args, drafter, dtype=target_config.dtype)
    width_args.refuse_narrow_blocks(server_args)
    width_args.bound_requests(server_args)
    _refuse_short_captures(server_args)
    if server_args.min_free_slots_delay is None:
        # SGLang waits for up to 4 free slots because its DFLASH prefill is expensive. Ours takes
        # only a few more launches than a plain one
        ARGS.write(server_args, min_free_slots_delay=1)
    overlap = _overlap(server_args)
    ARGS.write(server_args, disable_overlap_schedule=not overlap.schedule)
    logger.info(
        "DFLASH: overlap scheduling is %s (%s), the plan stream is %s.",
        "on" if overlap.schedule else "off",
        overlap.reason,
        "on" if overlap.plan_stream else "off",
    )


def _choose_draft_backend(
    server_args: Any, drafter: cfg.DrafterSpec, *, dtype: torch.dtype
) -> None:
    device = _device_type(server_args)
    capability = cards.current().capability if device == "cuda" else None
    place = Place(
        device,
        capability,
        is_fp32=dtype == torch.float32,
        kv_dtype=seams.draft_kv_dtype(server_args),
    )
    asked = server_args.speculative_draft_attention_backend
    backend = choose_draft_backend(drafter, place, asked=asked)
    ARGS.write(server_args, speculative_draft_attention_backend=backend)
    logger.info(
        "DFLASH: the drafter's attention runs on %s (%s).",
        backend,
        f"the default on {place}" if asked is None else "as asked for",
    )


def _quantise_drafter(server_args: Any, drafter: cfg.DrafterSpec, *, dtype: torch.dtype) -> None:
    """Check how the drafter is to be quantised, and undo SGLang's default: like the target."""
    quantised = server_args.speculative_draft_model_quantization
    if quantised is None:
        return
    if seams.asks_for_quantised_drafter(server_args):
        option = f"--speculative-draft-model-quantization {quantised}"
        if quantised != "fp8":
            raise ValueError(
                "DFLASH serves drafters as released or with FP8 weights, and does not support "
                f"{option}. Pass fp8, or drop it."
            )
        if _device_type(server_args) != "cuda":
            raise ValueError(f"{option} needs a GPU. Drop it.")
        fp8_drafter.check(
            drafter,
            capability=cards.current().capability,
            is_fp32=dtype == torch.float32,
            tp_size=server_args.tp_size,
        )
        logger.info("DFLASH: %s", fp8_drafter.describe(drafter))
        return
    ARGS.write(server_args, speculative_draft_model_quantization=None)
    logger.info(
        "DFLASH: --quantization %s applies to the target only; the drafter stays as released.",
        quantised,
    )


def _overlap(server_args: Any) -> cfg.Overlap:
    return cfg.Overlap.resolve(Environment(), disabled=server_args.disable_overlap_schedule)


def resolve_config(server_args: Any, *, target_config: Any) -> cfg.DFlashConfig:
    """Return a worker's frozen config from handled server arguments."""
    server_args = seams.settings(server_args)
    return cfg.DFlashConfig(
        drafter=read_drafter(server_args),
        block_size=server_args.speculative_num_draft_tokens,
        context_len=target_config.context_len,
        device=_device_type(server_args),
        draft_backend=server_args.speculative_draft_attention_backend,
        overlap=_overlap(server_args),
        draft_quantisation=server_args.speculative_draft_model_quantization,
        width=Environment().width(server_args.speculative_num_draft_tokens),
        shares_rows=Environment().shares_rows,
        simulated_accept_length=Environment().simulated_accept_length,
        draws_acceptance=Environment().draws_acceptance,
        compares_ranks=Environment().compares_ranks,
    )


def read_drafter(server_args: Any) -> cfg.DrafterSpec:
    """Read the drafter's spec from handled server arguments."""
    config = _drafter_config(server_args).to_dict()
    return cfg.DrafterSpec.from_loaded(config, name=server_args.speculative_draft_model_path)


def _drafter_config(server_args: Any) -> Any:
    """Read the drafter's config through SGLang, so that the checks see the config that loads."""
    path = server_args.speculative_draft_model_path
    if path is None:
        raise ValueError(
            "DFLASH needs a drafter: pass --speculative-draft-model-path with a folder or the "
            "name of a released one, for example z-lab/gemma-4-31B-it-DFlash."
        )
    try:
        config = compat.get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
            model_override_args=json.loads(server_args.json_model_override_args),
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The drafter {path} cannot be read ({error}). "
            "Pass a folder with config.json and safetensors, or a model name you have access to."
        ) from error
    return config


def target_spec(model_config: Any) -> cfg.TargetSpec:
    """Return the properties of a server's target that a drafter depends on."""
    return describe_target(
        model_config.hf_config, name=model_config.model_path, context_len=model_config.context_len
    )


def describe_target(config: Any, *, name: str, context_len: int | None = None) -> cfg.TargetSpec:
    """Return the properties of a target that a drafter depends on, from its config alone."""
    refuse_unknown_states(config, name=name)
    refuse_release(config, name=name)
    architecture = config.architectures[0]
    model_class, _ = compat.ModelRegistry.resolve_model_cls([architecture])
    text_config = config.get_text_config()
    return cfg.TargetSpec(
        name=name,
        architecture=architecture,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_layers=text_config.num_hidden_layers,
        context_len=context_len or text_config.max_position_embeddings,
        # targets that capture features themselves do so at the next layer's input
        delivers_last_layer=architecture.startswith("Gemma4") or not captures_itself(model_class),
    )


def _refuse_unsupported(server_args: Any) -> None:
    device = _device_type(server_args)
    if device not in draft_backends.BY_DEVICE:
        raise ValueError(
            f"DFLASH runs on {' and '.join(draft_backends.BY_DEVICE)}, not on --device "
            f"{server_args.device}. Serve without --speculative-algorithm DFLASH there."
        )
    asked = {
        f"pipeline parallelism (--pp-size {server_args.pp_size})": server_args.pp_size != 1,
        "DP attention (--enable-dp-attention), where a model's ranks have different requests": (
            compat.resolved_view(server_args).enable_dp_attention
        ),
        "--speculative-draft-window-size": server_args.speculative_draft_window_size is not None,
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--enable-torch-compile, which would compile around the kernels of a verify pass": (
            server_args.enable_torch_compile
        ),
        "--enable-pdmux, which mixes prefill and verify batches in one step": (
            server_args.enable_pdmux
        ),
        f"decode context parallelism (--dcp-size {server_args.dcp_size}), which splits the draft "
        "KV across ranks": server_args.dcp_size != 1,
        "--enable-hierarchical-cache, which is not tested to restore draft KV with a prefix": (
            server_args.enable_hierarchical_cache
        ),
        "--disaggregation-decode-enable-offload-kvcache, which offloads no draft KV": (
            server_args.disaggregation_decode_enable_offload_kvcache
        ),
        "--enable-memory-saver, because nothing reloads the drafter after a release": (
            server_args.enable_memory_saver
        ),
        f"--page-size {server_args.page_size} on a CPU, where SGLang cannot allocate pages": (
            device == "cpu" and server_args.page_size not in (None, 1)
        ),
        "a --speculative-accept-threshold below 1, which changes the output": min(
            server_args.speculative_accept_threshold_single,
            server_args.speculative_accept_threshold_acc,
        )
        < 1.0,
        f"--speculative-num-steps {server_args.speculative_num_steps} (a block takes one)": (
            server_args.speculative_num_steps not in (None, 1)
        ),
        f"--speculative-eagle-topk {server_args.speculative_eagle_topk} (a block is one chain)": (
            server_args.speculative_eagle_topk not in (None, 1)
        ),
        **seams.also_refused(server_args),
    }
    named = [name for name, given in asked.items() if given]
    if named:
        raise ValueError(
            f"DFLASH does not support {', '.join(named)}. Drop it, or serve without "
            "--speculative-algorithm DFLASH."
        )


def _refuse_short_drafter(config: Any, drafter: cfg.DrafterSpec, target: cfg.TargetSpec) -> None:
    """Refuse a drafter that is made for shorter contexts than the server's, as SGLang does once the
    target is loaded."""
    longest = compat.get_context_length(config.get_text_config())
    if target.context_len > longest and not Environment().allows_longer_contexts:
        raise ValueError(
            f"The drafter {drafter.name} is made for contexts of up to {longest} tokens, and the "
            f"server would take {target.context_len}. Pass --context-length {longest}, or set "
            f"{LONGER_CONTEXTS}=1: answers stay the same, but later drafts may fail more often."
        )


def _refuse_endless_wait(server_args: Any) -> None:
    """Refuse chunk sizes so small that deterministic mode never starts a longer prompt."""
    backend, chunk = server_args.attention_backend, server_args.chunked_prefill_size
    if not server_args.enable_deterministic_inference:
        return
    if backend not in DETERMINISTIC_PREFILL_ALIGN:
        return
    cut = Environment().prefill_align(backend)
    if chunk is not None and 0 < chunk < cut:
        variable, _ = DETERMINISTIC_PREFILL_ALIGN[backend]
        raise ValueError(
            f"With --enable-deterministic-inference and --attention-backend {backend} SGLang "
            f"aligns prefill chunks to {cut} tokens, so a prompt longer than "
            f"--chunked-prefill-size {chunk} would wait forever. Set --chunked-prefill-size "
            f"{cut}, or {variable}={chunk}."
        )


def _refuse_short_captures(server_args: Any) -> None:
    """Refuse what SGLang captures per token for clients, if a verify pass has more tokens than it
    keeps room for: it does not count drafts."""
    asked = {
        "--enable-return-routed-experts": server_args.enable_return_routed_experts,
        "--enable-return-indexer-topk": server_args.enable_return_indexer_topk,
    }
    named = [name for name, given in asked.items() if given]
    running, chunk = server_args.max_running_requests, server_args.chunked_prefill_size or 0
    adapts = _device_type(server_args) == "cuda" and width_args.why_one_width(server_args) is None
    # passes of any width stay within the largest graph
    blocks = server_args.cuda_graph_config.decode.max_bs if adapts else running
    rows = blocks * server_args.speculative_num_draft_tokens
    if named and max(chunk, running) < rows:
        raise ValueError(
            f"{' and '.join(named)}: with --chunked-prefill-size {chunk} SGLang has room for "
            f"{max(chunk, running)} tokens of a step, but a verify pass may have {rows}. Pass "
            f"--chunked-prefill-size {rows} or more."
        )


def _refuse_unreadable_cache(server_args: Any) -> None:
    """Refuse a KV cache that no Triton kernel can read or write on this card, and FP8 draft KV on a
    CPU."""
    draft_option = "--speculative-draft-kv-cache-dtype"
    draft_dtype = seams.draft_kv_dtype(server_args)
    if _device_type(server_args) != "cuda":
        if draft_dtype in ("fp8_e4m3", "fp8_e5m2"):
            raise ValueError(f"{draft_option} {draft_dtype} needs a GPU. Drop it.")
        return
    asked = {"--kv-cache-dtype": server_args.kv_cache_dtype, draft_option: draft_dtype}
    option = next((option for option, dtype in asked.items() if dtype == "fp8_e4m3"), None)
    card = cards.current()
    if option is not None and not card.has_e4m3:
        raise ValueError(
            f"{option} fp8_e4m3 needs compute capability 8.9 or later, but this card has "
            f"{'.'.join(map(str, card.capability))}. Pass {option} fp8_e5m2, or drop it."
        )


def _device_type(server_args: Any) -> str:
    return server_args.device.split(":")[0]


def _asked_block_size(server_args: Any) -> int | None:
    names = ("speculative_num_draft_tokens", "speculative_dflash_block_size")
    asked = {name: getattr(server_args, name) for name in names}
    sizes = {size for size in asked.values() if size is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"--speculative-num-draft-tokens {asked[names[0]]} and "
            f"--speculative-dflash-block-size {asked[names[1]]} are two names for the same "
            "setting. Pass only one."
        )
    return sizes.pop() if sizes else None
