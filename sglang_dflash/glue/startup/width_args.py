"""Whether the verify width may change from step to step, and how many requests run then."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.environment import SIMULATE, WIDTH, Environment
from sglang_dflash.glue import changes, compat, seams
from sglang_dflash.glue.startup.recurrent_targets import recurrent_config

logger = logging.getLogger(__name__)

# full blocks in the largest CUDA graph by default: SGLang sizes graphs and sampling memory by it
MAX_GRAPH_BLOCKS = 48
# the same where the verify width adapts: at 256 requests, 5 rows of 16 for each
MAX_ADAPTIVE_BLOCKS = 80
# and for targets up to this hidden size, whose steps take the host longer than the GPU: a row more
# costs nothing there, nor does its graph's memory
SMALL_HIDDEN_SIZE, MAX_SMALL_BLOCKS = 1024, 128

ARGS = changes.Settings(
    "ServerArgs", {"max_running_requests": "CUDA graphs and buffers need a bound"}
)
GRAPHS = changes.Fields(
    "PhaseConfig",
    dict.fromkeys(
        ("bs", "max_bs"), "graphs hold some full blocks, or more requests with fewer drafts"
    ),
)


def why_full_blocks(server_args: Any) -> str | None:
    """Return why a verify pass holds only full blocks; None if it may hold any number of drafts.

    Graphs keyed by rows need our attention kernel, which on some targets is not available after all
    (`glue/models/verify_backend.py`). Without a GPU there are no graphs.
    """
    model_config = seams.model_config(server_args)
    if recurrent_config(model_config.hf_config) is not None:
        return "linear attention verifies full blocks"
    if not server_args.device.startswith("cuda"):
        return None
    _, backend = compat.attention_backends_of(compat.resolved_view(server_args))
    reasons = {
        f"--attention-backend {backend} verifies full blocks; triton takes any width": (
            backend != "triton"
        ),
        "--enable-deterministic-inference has its own attention kernel": (
            server_args.enable_deterministic_inference
        ),
        "--disable-cuda-graph-padding": server_args.disable_cuda_graph_padding,
        "--enable-two-batch-overlap splits full blocks": server_args.enable_two_batch_overlap,
        "LoRA graphs are sized by full blocks": server_args.enable_lora,
        "the model's positions have several parts (mrope)": model_config.model_is_mrope,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def why_one_width(server_args: Any) -> str | None:
    """Return why all steps have the same width; None if it is chosen step by step."""
    environment = Environment()
    asked = environment.width(server_args.speculative_num_draft_tokens)
    if asked is not None:
        return f"{WIDTH}={asked}"
    if environment.simulated_accept_length is not None and not environment.draws_acceptance:
        return f"{SIMULATE} makes all blocks alike, which an automatic width could exploit"
    return why_full_blocks(server_args)


def refuse_narrow_blocks(server_args: Any) -> None:
    """Raise ValueError for a fixed width that this server's graphs cannot hold."""
    block_size = server_args.speculative_num_draft_tokens
    asked = Environment().width(block_size)
    reason = why_full_blocks(server_args)
    if asked not in (None, block_size) and reason is not None:
        raise ValueError(
            f"{WIDTH}={asked} needs verify passes of any width, but this server has only those of "
            f"full blocks of {block_size}: {reason}. Unset {WIDTH}, or change that."
        )


def bound_requests(server_args: Any) -> None:
    """Set how many requests run by default, and how many full blocks the CUDA graphs hold.

    If the verify width adapts, as many run as in plain decoding's largest graph: under load a step
    verifies fewer drafts of each, so its rows still fit into graphs of a few full blocks. Otherwise
    every request takes a full block.
    """
    adapts = server_args.device.startswith("cuda") and why_one_width(server_args) is None
    graphs = server_args.cuda_graph_config.decode
    if server_args.max_running_requests is None:
        default = max(graphs.max_bs, MAX_GRAPH_BLOCKS) if adapts else MAX_GRAPH_BLOCKS
        ARGS.write(server_args, max_running_requests=default)
        logger.info("DFLASH: --max-running-requests defaults to %d.", default)
    given = {key for phase, key in server_args._cuda_graph_config_locked if phase == "decode"}
    if adapts and not given & {"bs", "max_bs"}:
        config = seams.model_config(server_args).hf_config.get_text_config()
        is_small = config.hidden_size <= SMALL_HIDDEN_SIZE
        most = min(graphs.max_bs, MAX_SMALL_BLOCKS if is_small else MAX_ADAPTIVE_BLOCKS)
        GRAPHS.write(graphs, bs=[size for size in graphs.bs if size <= most], max_bs=most)
