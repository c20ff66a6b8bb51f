"""Mistakes on the command line are refused before anything loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.startup import width_args
from sglang_dflash.glue.startup.server_args import handle_dflash, read_drafter
from sglang_dflash.kernels import cards
from sglang_dflash.kernels.cards import Card
from sglang_dflash.testing.server import free_port
from tests.tiny_models import write_hybrid_config

# SGLang's; what linear attention keeps of its inputs
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"


class AskedForEverything:
    """Server arguments that are all set."""

    def __getattr__(self, name: str) -> bool:
        return True


def parse(models: Path, *extra: str, drafter: Path | str | None = None) -> Any:
    """Parse a command line as launch_server does."""
    from sglang.srt.server_args import prepare_server_args

    args = ["--model-path", str(models / "llama"), "--device", "cpu", "--dtype", "float32"]
    args += ["--attention-backend", "torch_native", "--disable-cuda-graph"]
    args += ["--speculative-algorithm", "DFLASH", "--port", str(free_port())]
    if drafter != "":
        args += ["--speculative-draft-model-path", str(drafter or models / "drafter")]
    try:
        found = prepare_server_args([*args, *extra])
        if "resolve_once" in compat.SYMBOLS:
            found.resolve_once()
        return seams.settings(found)
    except SystemExit as ended:
        # the message that the command exits with
        raise ValueError(ended.code) from None


def alter(args: Any, **values: Any) -> None:
    """Change resolved arguments, which SGLang itself only reads."""
    if "declare_resolution" in compat.SYMBOLS:
        seams.decide(args, **values)
        return
    for name, value in values.items():
        object.__setattr__(args, name, value)


def changed_drafter(models: Path, folder: Path, **changes: Any) -> Path:
    """Copy the drafter with changed keys in its config.json; None removes a key."""
    shutil.copytree(models / "drafter", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_arguments_are_completed(models: Path) -> None:
    args = parse(models)
    assert args.speculative_num_draft_tokens == 16
    assert args.speculative_num_steps == args.speculative_eagle_topk == 1
    assert args.speculative_draft_attention_backend == "torch_native"
    assert args.max_running_requests == 48
    assert not args.disable_overlap_schedule
    assert args.min_free_slots_delay == 1
    assert parse(models, "--min-free-slots-delay", "3").min_free_slots_delay == 3


ON_GPU = ("--device", "cuda", "--attention-backend", "triton", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("capability", "default"),
    [((8, 9), "triton"), ((9, 0), "fa4"), ((10, 0), "fa4"), ((12, 0), "triton")],
    ids=str,
)
def test_the_card_chooses_the_drafters_backend(
    models: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], default: str
) -> None:
    monkeypatch.setattr(cards, "current", lambda: Card(capability))
    assert parse(models, *ON_GPU).speculative_draft_attention_backend == default
    asked = ("--speculative-draft-attention-backend", "flashinfer")
    assert parse(models, *ON_GPU, *asked).speculative_draft_attention_backend == "flashinfer"
    if default != "fa4":
        with pytest.raises(ValueError, match=r"fa4 cannot run.*triton or.*or drop it for triton"):
            parse(models, *ON_GPU, "--speculative-draft-attention-backend", "fa4")


def test_experts_are_captured_for_a_whole_verify_pass(models: Path) -> None:
    """SGLang sizes the buffer by chunks and requests; a larger pass would end the server."""
    asked = ("--enable-return-routed-experts", "--max-running-requests", "8")
    with pytest.raises(ValueError, match="routed-experts: with .* for 127 tokens .* may have 128"):
        parse(models, *asked, "--chunked-prefill-size", "127")
    parse(models, *asked, "--chunked-prefill-size", "128")


def test_a_switch_turns_overlap_off(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_DFLASH_SPEC_V2", "0")
    assert parse(models).disable_overlap_schedule


def test_smaller_block_is_kept(models: Path) -> None:
    assert parse(models, "--speculative-num-draft-tokens", "8").speculative_num_draft_tokens == 8
    assert parse(models, "--speculative-dflash-block-size", "8").speculative_num_draft_tokens == 8


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param(
            ["--speculative-num-draft-tokens", "17"], "17 exceeds the block size 16", id="block 17"
        ),
        pytest.param(
            ["--speculative-num-draft-tokens", "1"], "1 leaves nothing to draft", id="block 1"
        ),
        pytest.param(
            ["--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "4"],
            "two names for the same setting",
            id="two blocks",
        ),
        pytest.param(["--pp-size", "2"], r"pipeline parallelism \(--pp-size 2\)", id="pp"),
        pytest.param(
            ["--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"],
            r"DP attention \(.*\), where a model's ranks have different requests",
            id="dp attention",
        ),
        pytest.param(
            ["--speculative-draft-attention-backend", "fa4"],
            "fa4 cannot run.*--speculative-draft-attention-backend torch_native",
            id="draft backend",
        ),
        pytest.param(
            ["--speculative-accept-threshold-single", "0.5"],
            "accept-threshold below 1, which changes the output",
            id="lossy",
        ),
        pytest.param(
            [
                *(
                    "--disaggregation-mode",
                    "decode",
                    "--disaggregation-decode-enable-offload-kvcache",
                ),
                *("--hicache-storage-backend", "file"),
            ],
            "enable-offload-kvcache, which offloads no draft KV",
            id="offload",
        ),
        pytest.param(["--page-size", "16"], "--page-size 16 on a CPU", id="pages"),
        pytest.param(["--speculative-num-steps", "3"], "a block takes one", id="steps"),
        pytest.param(
            ["--enable-torch-compile"], "--enable-torch-compile, which would compile", id="compile"
        ),
        pytest.param(
            ["--enable-pdmux"], "--enable-pdmux, which mixes prefill and verify batches", id="pdmux"
        ),
        pytest.param(
            ["--tp-size", "2", "--dcp-size", "2"],
            r"decode context parallelism \(--dcp-size 2\), which splits the draft KV across ranks",
            id="dcp",
        ),
        pytest.param(
            ["--enable-hierarchical-cache"],
            "--enable-hierarchical-cache, which is not tested to restore draft KV",
            id="hierarchical cache",
        ),
        pytest.param(
            ["--enable-memory-saver"],
            "--enable-memory-saver, because nothing reloads the drafter after a release",
            id="memory saver",
        ),
        pytest.param(["--speculative-draft-window-size", "64"], "draft-window-size", id="window"),
    ],
)
def test_unsupported_argument_is_refused(models: Path, extra: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(models, *extra)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_prefill_and_decode_may_be_apart(models: Path, mode: str) -> None:
    assert parse(models, "--disaggregation-mode", mode).disaggregation_mode == mode


@pytest.mark.skipif(not seams.also_refused(AskedForEverything()), reason="nothing to refuse here")
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--enable-unified-memory"], "--enable-unified-memory, which moves KV to other slots"),
        (["--enable-watermark"], "--enable-watermark, whose sampler our kernels do not have"),
    ],
    ids=["unified memory", "watermark"],
)
def test_what_only_this_release_offers_is_refused(
    models: Path, extra: list[str], message: str
) -> None:
    """SGLang's own checks of these run later, or let them pass."""
    with pytest.raises(ValueError, match=message):
        parse(models, *extra)


def test_chunks_that_would_let_a_prompt_wait_for_ever_are_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic = ["--enable-deterministic-inference", "--chunked-prefill-size", "64"]
    parse(models, *deterministic)  # torch_native can split a prompt anywhere
    on_triton = [*deterministic, "--attention-backend", "triton"]
    on_triton += ["--speculative-draft-attention-backend", "torch_native"]
    with pytest.raises(
        ValueError, match="longer than --chunked-prefill-size 64 would wait forever"
    ):
        parse(models, *on_triton)
    monkeypatch.setenv("SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", "64")
    assert parse(models, *on_triton).chunked_prefill_size == 64
    monkeypatch.setenv("SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", "few")
    with pytest.raises(ValueError, match="ALIGN_SIZE=few is not an integer"):
        parse(models, *on_triton)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SGLANG_DFLASH_COMPARE_RANKS", "maybe", "is neither on nor off"),
        ("SGLANG_DFLASH_RANK_PATIENCE", "-1", "is not a number of at least 0"),
        ("SGLANG_DFLASH_ALARM", "nan", "is not a number of at least 0"),
        ("SGLANG_DFLASH_ALARM_WINDOW", "0", "is not a number of at least 1"),
    ],
)
def test_a_variable_that_a_rank_reads_is_checked_with_the_arguments(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """A rank reads it after the target is loaded, and its error ends in a traceback."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}={value} {message}"):
        parse(models)


def test_device_is_refused(models: Path) -> None:
    args = parse(models)
    alter(args, device="xpu")
    with pytest.raises(ValueError, match="runs on cuda and cpu, not on --device xpu"):
        handle_dflash(args)


def test_missing_drafter_is_refused(models: Path) -> None:
    with pytest.raises(ValueError, match="DFLASH needs a drafter: pass --speculative-draft-model"):
        parse(models, drafter="")


def test_target_without_a_method_to_capture_features_passes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks on its layers capture them."""
    model_class, _ = compat.ModelRegistry.resolve_model_cls(["LlamaForCausalLM"])
    for method in ("dflash", "eagle3"):
        monkeypatch.delattr(model_class, f"set_{method}_layers_to_capture")
    parse(models)


def test_target_with_other_recurrent_layers_is_refused(models: Path, tmp_path: Path) -> None:
    target = write_hybrid_config(tmp_path / "hybrid", "lfm2")
    with pytest.raises(ValueError, match="hybrid.*has linear-attention or Mamba.*SGLANG_DFLASH"):
        parse(models, "--model-path", str(target), "--disable-radix-cache")


needs_states = pytest.mark.skipif(
    not seams.chooses_snapshots, reason="refused with this release of SGLang"
)


@needs_states
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        pytest.param([], {"SGLANG_DFLASH_WIDTH": "4"}, "linear attention verifies", id="width"),
        pytest.param([], {CONV_DTYPE: "bfloat16"}, f"{CONV_DTYPE}=float32", id="rounding"),
        pytest.param(["--enable-linear-replayssm"], {}, "instead of states", id="replay"),
        pytest.param(
            ["--disaggregation-mode", "prefill"], {}, "transfer their states", id="disaggregation"
        ),
    ],
)
def test_target_with_linear_attention_refuses(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    message: str,
) -> None:
    target = write_hybrid_config(tmp_path / "hybrid", "qwen3_next")
    for name, value in {CONV_DTYPE: "float32", **variables}.items():
        monkeypatch.setenv(name, value)
    common = ("--model-path", str(target), "--disable-radix-cache")
    with pytest.raises(ValueError, match=message):
        parse(models, *common, *arguments)


@needs_states
def test_target_with_linear_attention_gets_full_blocks(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONV_DTYPE, "float32")
    target = write_hybrid_config(tmp_path / "hybrid", "qwen3_next")
    common = ("--model-path", str(target), "--disable-radix-cache")
    why = width_args.why_one_width(parse(models, *common))
    assert why == "linear attention verifies full blocks"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"hidden_size": 64}, "has hidden size 64.*has 128", id="hidden size"),
        pytest.param({"vocab_size": 1000}, "vocabulary of 1000.*of 1024", id="vocabulary"),
        pytest.param(
            {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 3, 9]}},
            r"reads target layers \[9\]",
            id="layer ids",
        ),
        pytest.param(
            {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 3]}},
            "trained on 3 features.*names 2 target layers",
            id="features",
        ),
        pytest.param(
            {"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "names no mask token", id="mask"
        ),
        pytest.param(
            {"architectures": ["DFlashLagunaForCausalLM"]},
            r"does not support: architectures \['DFlashLagunaForCausalLM'\]",
            id="architecture",
        ),
        pytest.param({"is_causal": True}, "does not support: is_causal True", id="switch"),
    ],
)
def test_drafter_that_does_not_fit_is_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    drafter = changed_drafter(models, tmp_path / "drafter", **changes)
    with pytest.raises(ValueError, match=message):
        parse(models, drafter=drafter)


def test_a_drafter_is_read_again_after_sglang_has_written_into_its_config(models: Path) -> None:
    """SGLang keeps one config object per process and writes its own keys into it."""
    args = parse(models)
    config = compat.get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args={},
    )
    drafter = read_drafter(args)
    config.some_new_note = 7
    try:
        assert read_drafter(args) == drafter
        with pytest.raises(ValueError, match="some_new_note 7"):
            handle_dflash(args)
    finally:
        del config.some_new_note


@pytest.mark.parametrize("content", [None, "{ not json"], ids=["absent", "garbled"])
def test_unreadable_drafter_is_refused(models: Path, tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "drafter"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="cannot be read.*Pass a folder with config.json"):
        parse(models, drafter=folder)
