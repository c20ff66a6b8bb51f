"""SGLang's offline engine without speculation: it generates a target's answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_dflash.environment import Environment
from sglang_dflash.glue import compat
from sglang_dflash.train.answers import Ask, Question


@contextmanager
def offline_engine(
    model_path: str,
    *,
    stop: Collection[int],
    seed: int,
    max_length: int,
    rows: int,
    attention_backend: str,
) -> Iterator[Ask]:
    """Run an engine that answers `rows` questions at once; leaving the context shuts it down and
    frees its GPU. Sampled answers depend on the seed and on the rest of the batch."""
    context_length = max_length + 8
    engine = compat.Engine(
        model_path=model_path,
        # tokens in, tokens out: re-encoding text does not always give the same tokens
        skip_tokenizer_init=True,
        random_seed=seed,
        context_length=context_length,
        max_running_requests=rows,
        attention_backend=attention_backend,
        # does not need a compiler on the host
        sampling_backend="pytorch",
        **_device_settings(rows, context_length),
    )
    try:
        yield lambda questions: _ask(engine, questions, sorted(stop))
    finally:
        engine.shutdown()


def _device_settings(rows: int, context_length: int) -> dict[str, Any]:
    if Environment().is_cpu_mode:
        return {
            "device": "cpu",
            "dtype": "float32",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": 16384,
        }
    return {
        "mem_fraction_static": 0.8,
        # no more than can be used, so that several engines with different prompts fit on a GPU
        "max_total_tokens": rows * context_length,
        # nearly all steps run a full batch, and each size takes most of a second to capture
        "cuda_graph_bs_decode": sorted({rows >> n for n in range(rows.bit_length())}),
        # prefill is a small part of the work, and its graphs take a while to capture
        "disable_prefill_cuda_graph": True,
    }


def _ask(engine: Any, questions: Sequence[Question], stop: list[int]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    # separately, because a mixed batch sorts the whole vocabulary in every step
    for greedy in (True, False):
        places = [i for i, q in enumerate(questions) if (q.temperature == 0) == greedy]
        if not places:
            continue
        found = engine.generate(
            input_ids=[questions[i].token_ids for i in places],
            sampling_params=[_sampling(questions[i], stop) for i in places],
        )
        answers |= {i: answer["output_ids"] for i, answer in zip(places, found, strict=True)}
    return [answers[i] for i in range(len(questions))]


def _sampling(question: Question, stop: list[int]) -> dict[str, Any]:
    return {
        "temperature": question.temperature,
        "max_new_tokens": question.max_new_tokens,
        "stop_token_ids": stop,
        # the target's full distribution, whatever its generation_config sets
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
