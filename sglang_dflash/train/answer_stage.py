"""The first stage: the target's own answers to the prompts, generated or taken from other runs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

from sglang_dflash.train import answers as store
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.held_out import Split, split_answers
from sglang_dflash.train.other_runs import Origin, origin_of, read_other_runs
from sglang_dflash.train.prepare import Run, load_target
from sglang_dflash.train.prompts import Prompts, read_prompts
from sglang_dflash.train.turns import Talks, Turn, is_later, prompt_key

# starts an engine that generates answers; injected, because only glue may import SGLang
Engine = Callable[..., AbstractContextManager[store.Ask]]

# questions per engine call; written together, so an interrupted run loses at most these
ENGINE_GROUP = 2048
# questions grouped into single-temperature batches; each batch is written when complete
TRANSFORMERS_GROUP = 64


def collect_answers(run: Run, engine: Engine | None) -> Split:
    """Return the answers to train on and those held out, generating the missing ones."""
    config = run.config
    if config.answers:
        found = read_other_runs(config, vocab_size=run.drafter.vocab_size)
        origin = origin_of(config.answers)
    else:
        found = store.read_answers(store.answer_files(run.out), repair=True)
        origin = _earlier_origin(run)
        if config.prompts:
            origin = generate_answers(run, engine, known=found)
            found = store.read_answers(store.answer_files(run.out))
    split = split_answers(found, prompts=config.held_out)
    # with --share, one call's answers may be too few; they are joined later, and split again
    only_answers = config.stop_after == "answers"
    if not split.training and not only_answers:
        raise ValueError(
            f"{len(found)} answers to {len(split.held_out)} prompts were found and --held-out is "
            f"{config.held_out}: nothing is left to train on. Pass more --prompts or --answers, or "
            "hold out fewer."
        )
    _note_answers(run, found, origin=origin, left_out=0 if only_answers else split.left_out)
    return split


def _earlier_origin(run: Run) -> Origin:
    """Return the origin that an earlier call has noted for the answers in the out folder."""
    noted = run.read("run.json")
    engine = noted["answers"].get("engine", "an earlier call")
    return Origin(files=noted["files"], engine=engine, commands=[])


def generate_answers(run: Run, engine: Engine | None, *, known: dict[str, store.Answer]) -> Origin:
    """Answer the prompts that have no answer yet; return where all answers come from."""
    config = run.config
    prompts = read_prompts(
        config.prompts,
        tokenizer=run.tokenizer,
        thinking=config.enable_thinking,
        max_length=config.max_length,
    )
    _check_held_out(config, prompts, known)
    kind = _choose_engine(run, engine)
    turns = _Turns(run, prompts, kind)
    print(
        f"train: {len(prompts.token_ids)} prompts ({prompts.repeated} repeated and "
        f"{prompts.too_long} too long left out), {len(prompts.talks)} with later turns",
        flush=True,
    )
    missing = turns.missing(known)
    if missing:
        with _start_engine(run, engine, kind) as ask:
            deadline = time.monotonic() + 60 * (config.answer_minutes or math.inf)
            while missing:
                left = deadline - time.monotonic()
                store.answer_questions(
                    missing, ask=ask, stop=run.stop, folder=run.out, seconds=left
                )
                if time.monotonic() > deadline:
                    break
                missing = turns.missing(store.read_answers(store.answer_files(run.out)))
    return Origin(files=[asdict(file) for file in prompts.files], engine=kind, commands=[])


class _Turns:
    """What is left to ask in this call's share, turn by turn."""

    def __init__(self, run: Run, prompts: Prompts, kind: str) -> None:
        config = run.config
        self._kind = kind
        # those before it are answered
        self._number = 0
        self._first = store.make_questions(
            prompts.token_ids,
            held_out=config.held_out,
            temperatures=config.temperatures,
            per_prompt=config.answers_per_prompt,
            max_new_tokens=config.max_new_tokens,
            max_length=config.max_length,
            seed=config.seed,
        )[config.share]
        # a held-out prompt is asked once
        held_out = set(list(prompts.token_ids)[: config.held_out])
        self._talks = Talks(
            chats={key: chat for key, chat in prompts.talks.items() if key not in held_out},
            tokenizer=run.tokenizer,
            thinking=config.enable_thinking,
            max_new_tokens=config.max_new_tokens,
            max_length=config.max_length,
        )

    def missing(self, known: Mapping[str, store.Answer]) -> list[list[store.Question]]:
        """Return the unanswered questions of the first turn that has any, in parts that are
        generated and written together; say how many they are."""
        while self._number <= self._talks.most_turns:
            number = self._number
            turn = self._talks.ask_turn(number, self._first, known) if number else Turn(self._first)
            parts = _parts(turn.questions, self._kind)
            # partition first, then drop answered questions: a resumed run has the same parts
            left = [[q for q in part if q.key not in known] for part in parts]
            left = [part for part in left if part]
            if left:
                ended = f" ({turn.unfinished} talks ended without a stop, {turn.too_long} too long)"
                print(
                    f"train: turn {number + 1}: {sum(map(len, left))} answers to generate with "
                    f"{self._kind}{ended if number else ''}",
                    flush=True,
                )
                return left
            self._number += 1
        return []


def _choose_engine(run: Run, engine: Engine | None) -> str:
    if run.config.engine != "auto":
        return run.config.engine
    return "sglang" if run.device.type == "cuda" and engine is not None else "transformers"


@contextmanager
def _start_engine(run: Run, engine: Engine | None, kind: str) -> Iterator[store.Ask]:
    """Run an engine that answers questions, until the context is left."""
    config = run.config
    if kind == "transformers":
        target = load_target(run)
        yield store.ask_transformers(target, stop=run.stop, pad_id=run.pad_id, seed=config.seed)
        return
    if engine is None:
        raise ValueError("--engine sglang was asked for but SGLang is not installed here.")
    began = time.monotonic()
    with engine(
        config.model_path,
        stop=run.stop,
        seed=config.seed,
        max_length=config.max_length,
        rows=config.engine_rows,
        attention_backend=config.attention_backend,
    ) as ask:
        print(f"train: engine ready after {time.monotonic() - began:.0f} s", flush=True)
        yield ask


def _parts(questions: Sequence[store.Question], kind: str) -> list[list[store.Question]]:
    if kind == "transformers":
        return store.in_batches(questions, group=TRANSFORMERS_GROUP, rows=store.ROWS)
    return store.in_groups(questions, ENGINE_GROUP)


def _check_held_out(config: TrainConfig, prompts: Prompts, known: dict[str, store.Answer]) -> None:
    """Raise ValueError if holding out leaves no prompts, before any answer is generated."""
    # prompts of earlier calls count, since their answers are trained on too
    count = len(prompts.token_ids.keys() | set(map(prompt_key, known)))
    if count <= config.held_out:
        files = ", ".join(str(path) for path in config.prompts)
        raise ValueError(
            f"{files}: {count} prompts ({prompts.repeated} repeated and {prompts.too_long} too "
            f"long left out) and --held-out is {config.held_out}: nothing is left to train on. "
            f"Pass more than {config.held_out} prompts, or hold out fewer."
        )


def _note_answers(
    run: Run, found: dict[str, store.Answer], *, origin: Origin, left_out: int
) -> None:
    noted = {
        "count": len(found),
        "tokens": sum(len(answer.answer_ids) for answer in found.values()),
        "stopped": sum(answer.finish == "stop" for answer in found.values()),
        "later_turns": sum(map(is_later, found)),
        "held_out": run.config.held_out,
        "left_out": left_out,
        "temperatures": _temperatures(found.values()),
        "engine": origin.engine,
        "commands": origin.commands,
    }
    run.write("run.json", run.read("run.json") | {"files": origin.files, "answers": noted})
    further = f"; {left_out} further answers to held-out prompts are left out" if left_out else ""
    print(
        f"train: {noted['count']} answers ({noted['later_turns']} to later turns), "
        f"{noted['tokens']} tokens, {noted['stopped']} ended on their own{further}",
        flush=True,
    )


def _temperatures(answers: Iterable[store.Answer]) -> str:
    # counted from the answers, which may come from runs with other temperatures
    counts = Counter(answer.temperature for answer in answers)
    return ", ".join(f"{t:g} ({counts[t]} answers)" for t in sorted(counts))
