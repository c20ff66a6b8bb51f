"""A tiny but complete Gemma 4: the real vocabulary and chat template, a vision tower, and a few
memorised answers, so that thinking, tool calls and end-of-turn tokens really occur.

It is trained on the few tokens that its conversations use; the other embedding rows stay small
and random.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4TextConfig,
    Gemma4VideoProcessor,
    PreTrainedTokenizerBase,
)

from tests.gemma4_tokenizer import FILES
from tests.tiny_models import make_drafter

VOCAB = 262_144
BLOCK = 8  # half the released size: with a vocabulary this large, most of a step is the head
END_OF_TURN = "<turn|>"
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "position_embedding_size": 1024,
}
LEARNED = 0.01  # mean loss on the answers
MAX_STEPS = 300  # 42 are enough


@dataclass(frozen=True)
class Conversation:
    """A request to the server, and the answer that the model has learned."""

    messages: list[dict[str, Any]]
    answer: str  # as the model writes it, special tokens included
    request: dict[str, Any] = field(default_factory=dict)  # additional API arguments

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Apply the chat template as the server should: it parses the JSON of calls first."""
        messages = copy.deepcopy(self.messages)
        for call in [call for message in messages for call in message.get("tool_calls", ())]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return tokenizer.apply_chat_template(
            messages,
            tools=self.request.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **self.request.get("extra_body", {}).get("chat_template_kwargs", {}),
        )

    def answer_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return tokenizer.encode(self.answer + END_OF_TURN, add_special_tokens=False)


def make_chat_pair(
    folder: Path, tokenizer_folder: Path, conversations: list[Conversation]
) -> tuple[Path, Path]:
    """Write a target trained on the conversations, and a random drafter for it."""
    target = folder / "target"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    # the template writes <bos>; a second one would change the prompt
    assert tokenizer.encode("") == [], f"the tokenizer in {tokenizer_folder} adds tokens itself"
    examples = [(c.prompt_ids(tokenizer), c.answer_ids(tokenizer)) for c in conversations]
    torch.manual_seed(0)
    used = sorted({token for prompt, answer in examples for token in prompt + answer})
    grow(learn(examples, used), used).to(torch.bfloat16).save_pretrained(target)
    Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        video_processor=Gemma4VideoProcessor(),
        tokenizer=tokenizer,
    ).save_pretrained(target)
    # the original files, not as transformers would write them
    for name in FILES:
        shutil.copy(tokenizer_folder / name, target / name)
    drafter = make_drafter(
        folder / "drafter",
        hidden_size=TEXT["hidden_size"],
        head_dim=16,
        vocab_size=VOCAB,
        num_target_layers=TEXT["num_hidden_layers"],
        target_layer_ids=(0, 1),
        mask_token_id=4,
        block_size=BLOCK,
    )
    return target, drafter


def learn(examples: list[tuple[list[int], list[int]]], used: list[int]) -> Gemma4ForCausalLM:
    """Train a model on a vocabulary of the used tokens only, until it has learned every answer."""
    model = Gemma4ForCausalLM(Gemma4TextConfig(**TEXT, vocab_size=len(used)))
    inputs, labels = batch_of(examples, {token: i for i, token in enumerate(used)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(MAX_STEPS):
        logits = model(inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        if loss.item() < LEARNED:
            return model.eval()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"loss is still {loss.item():.3f} after {MAX_STEPS} steps")


def batch_of(
    examples: list[tuple[list[int], list[int]]], index: dict[int, int]
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, padded on the right; only answers have labels."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    inputs = torch.zeros(len(examples), width, dtype=torch.int64)
    labels = torch.full_like(inputs, -100)
    for row, (prompt, answer) in enumerate(examples):
        token_ids = torch.tensor([index[token] for token in prompt + answer])
        inputs[row, : len(token_ids)] = token_ids
        labels[row, len(prompt) : len(token_ids)] = token_ids[len(prompt) :]
    return inputs, labels


def grow(small: Gemma4ForCausalLM, used: list[int]) -> Gemma4ForConditionalGeneration:
    """Return the same model with the full vocabulary and a random vision tower."""
    config = Gemma4Config(
        text_config={**TEXT, "vocab_size": VOCAB},
        vision_config=VISION,
        audio_config=None,
        eos_token_id=[1, 106],
    )
    whole = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, param in whole.named_parameters():
            if "norm" not in name:
                param.normal_(std=0.08)
        learned = small.model.state_dict()
        embedding = torch.randn(VOCAB, TEXT["hidden_size"]) * 0.02
        embedding[used] = learned["embed_tokens.weight"]
        whole.model.language_model.load_state_dict({**learned, "embed_tokens.weight": embedding})
    return whole.eval()
