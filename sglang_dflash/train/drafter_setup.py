"""The drafter's config: derived from the target, or read from the drafter to train further."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from sglang_dflash import mask_embedding
from sglang_dflash.reference.model import FULL, SLIDING, DrafterConfig

FEATURE_LAYERS = 5


def load_target_parts(
    model_path: str,
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, tuple[int, ...]]:
    """Return the target's text config, its tokenizer, and its end-of-sequence tokens."""
    try:
        config = AutoConfig.from_pretrained(model_path).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(model_path).is_dir() else "name"
        raise ValueError(
            f"--model-path {model_path} (a {kind}) has no model that transformers can read: "
            f"{str(error).splitlines()[0]} Pass a folder with config.json and a tokenizer, or a "
            "name you have access to."
        ) from None
    try:
        ends = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        ends = config.eos_token_id
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return config, tokenizer, tuple(sorted(i for i in found if i is not None))


def find_drafter(name: str) -> Path:
    """Return the folder of a drafter, given a folder or a Hugging Face name."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--init-from {name} is neither a folder nor a model that can be downloaded: "
            f"{str(error).splitlines()[0]} Pass a drafter's folder, or a name you have access to."
        ) from None


def read_drafter_config(folder: Path, target: PretrainedConfig) -> DrafterConfig:
    """Return the config of a drafter to train further; raise ValueError for another target's."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except OSError:
        raise ValueError(
            f"--init-from {folder} has no config.json. Pass a drafter's folder."
        ) from None
    config = DrafterConfig.from_json(raw, name=str(folder))
    if config.draft_vocab_size is not None or config.sample_from_anchor:
        raise ValueError(
            f"--init-from {folder} has a head of its own, or samples from the anchor, but training "
            "needs a drafter that shares the target's head and predicts each row's own token. Pass "
            "another drafter, or train a new one without --init-from."
        )
    if (folder / mask_embedding.FILE).exists():
        raise ValueError(
            f"--init-from {folder} has a learned {mask_embedding.FILE}, which the trainer cannot "
            "train. Pass another drafter, or train a new one without --init-from."
        )
    if config.dflash2 is not None:
        raise ValueError(
            f"--init-from {folder} is a DFlash2 drafter, whose convolutions and selector the "
            "trainer cannot train. Pass a plain DFlash drafter, or train a new one without "
            "--init-from."
        )
    # a speculators config does not name the number of layers
    config = replace(config, num_target_layers=config.num_target_layers or target.num_hidden_layers)
    wanted = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
    }
    wrong = [
        f"{name} is {getattr(config, name)} but the target's is {value}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise ValueError(
            f"--init-from {folder} is a drafter for another target: {', '.join(wrong)}. Pass one "
            "for this target, or train a new one without --init-from."
        )
    return config


def spread_layer_ids(count: int, features: int = FEATURE_LAYERS) -> tuple[int, ...]:
    """Return distinct layer ids, evenly spaced from the second to the third-last of `count`."""
    if count < 4:
        return tuple(range(max(1, count - 1)))
    ids = {round(1 + i * (count - 4) / (features - 1)) for i in range(features)}
    return tuple(sorted(ids))


def choose_mask_token(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's mask token; else the first embedding row that no token uses; else
    the last special token that the chat template does not name."""
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < config.vocab_size:
        return len(tokenizer)
    taken = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    special = {
        id_: token.content
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in taken
    }
    free = [i for i, text in special.items() if text not in str(tokenizer.chat_template)]
    if not free:
        raise ValueError(
            "The target has no mask token, no unused embedding row and no unused special token. "
            "Pass --mask-token-id with a token that its chats do not contain."
        )
    return max(free)


def _check_mask_token(mask_token_id: int, config: PretrainedConfig) -> None:
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(
            f"--mask-token-id {mask_token_id} lies outside the target's vocabulary of "
            f"{config.vocab_size}. Pass 0 to {config.vocab_size - 1}."
        )


def _layer_types(layers: int, sliding_window: int) -> tuple[str, ...]:
    # like the released drafters: full attention in the last layer
    return ((SLIDING if sliding_window else FULL),) * (layers - 1) + (FULL,)


def make_drafter_config(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    layers: int,
    block_size: int,
    target_layer_ids: Sequence[int] | None,
    mask_token_id: int | None,
    sliding_window: int,
    stop: Sequence[int],
) -> DrafterConfig:
    """Return a drafter config with the target's hidden sizes, heads and RoPE."""
    if mask_token_id is None:
        mask_token_id = choose_mask_token(config, tokenizer)
    _check_mask_token(mask_token_id, config)
    heads = config.num_attention_heads
    return DrafterConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 3 * config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        block_size=block_size,
        num_target_layers=config.num_hidden_layers,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids or spread_layer_ids(config.num_hidden_layers)),
        layer_types=_layer_types(layers, sliding_window),
        sliding_window=sliding_window or None,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.max_position_embeddings,
        eos_token_id=stop[0] if stop else None,
        pad_token_id=tokenizer.pad_token_id,
    )


def _rope_theta(config: PretrainedConfig) -> float:
    # transformers 5 nests it in rope_parameters, for some models once more per layer type
    nested = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in nested:
        nested = next((v for v in nested.values() if isinstance(v, dict)), {})
    return float(nested.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
