"""The tokenizer of the tiny pair: a byte-level BPE with a ChatML-like template. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 1024
PAD, START, END, MASK = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

# each turn is its role, a line break, its text and the end token; no default system turn
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, *, texts: list[str]) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of exactly VOCAB_SIZE entries and save it to `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    raw = Tokenizer(models.BPE())
    # words keep their leading space; digits are split, so that "12" is always two tokens
    words = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    if raw.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"The corpus gave {raw.get_vocab_size()} tokens but {VOCAB_SIZE} are needed. "
            "Pass more varied texts."
        )
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    # not save_pretrained: these keys are read by every transformers release since 4.40
    settings = {
        "additional_special_tokens": [START],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "mask_token": MASK,
        "model_max_length": 2048,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder)
