"""Serve a pair on this machine, ask it questions, and show what DFlash does.

    python launch/demo.py           # plain decoding and DFLASH side by side, speed and acceptance
    python launch/demo.py --chat    # ask your own questions
    python launch/demo.py --tiny    # the embedded toy pair, which needs no download
    python launch/demo.py --model-path M --draft-model-path D    # a pair of your own

The pair is SmolLM2-135M-Instruct, downloaded once (93 MB), and the drafter in this repository; with
--tiny, or if the download fails, it is the embedded toy pair. Two servers, with and without
speculation, answer each question in turn, so that neither slows the other; on a GPU if torch can
use one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import smollm2_drafter, tiny_drafter, tiny_target
from sglang_dflash.pairs.smollm2 import smollm2_target
from sglang_dflash.testing.server import Server
from sglang_dflash.testing.side_by_side import ACCEPTED, Told, bars, tell_both
from sglang_dflash.testing.stream import Answer, Piece, show, stream_pieces

SCRIPTS = Path(__file__).resolve().parent
# questions of the kinds that the embedded pair was trained on
TINY_QUESTIONS = (
    "Please tell me a short story about Otto, a curious hare.",
    "Write the 8 times table up to 7.",
    "Describe the island of Hollow as JSON.",
    "Name the months of the year, beginning with March.",
)
QUESTIONS = (
    "Please tell me a short story about a curious hare.",
    "Write a Python function that tells whether a number is prime.",
    "A train goes 60 miles an hour. How far does it go in two and a half hours?",
    "Name the months of the year, beginning with March.",
)
PLAIN, DFLASH = "plain decoding", "DFLASH"
MAX_TOKENS = 160
MAX_CHAT_TOKENS = 300
WARM_UP_TOKENS = 16
# no question is asked after so many seconds, however slow the machine: the demo, with the start of
# its servers, is to end within five minutes on two cores
ANSWERS_S = 120
# what a terminal has of the colours of benchmarks/picture_style.py
SPEED_COLOURS = {PLAIN: "grey46", DFLASH: ACCEPTED}
# a CPU computes a block's rows one after another: more of them cost more than they gain
CPU_BLOCK = 6
MERGED = "(some steps arrived as one chunk: of those only the last token is marked as the target's)"


@dataclass(frozen=True)
class Pair:
    target: str
    drafter: str
    cpu_block: int | None = None  # block size on a CPU; None: the drafter's own
    is_tiny: bool = False

    @property
    def questions(self) -> tuple[str, ...]:
        return TINY_QUESTIONS if self.is_tiny else QUESTIONS

    def serve(self, *, plain: bool = False) -> Server:
        # here, not above: Ctrl-C ends the demo during a slow import, too
        import torch

        if torch.cuda.is_available():
            # two servers share the GPU
            return GpuServer(self.target, self.drafter, plain=plain, env={"MEM_FRACTION": "0.4"})
        args = ["--model-path", self.target]
        if not plain:
            args += ["--speculative-draft-model-path", self.drafter]
            if self.cpu_block is not None:
                args += ["--speculative-num-draft-tokens", str(self.cpu_block)]
        threads = 1 if self.is_tiny else os.cpu_count()
        return CpuServer(*args, plain=plain, env={"OMP_NUM_THREADS": str(threads)})


class CpuServer(Server):
    script = SCRIPTS / "cpu.sh"


class GpuServer(Server):
    script = SCRIPTS / "serve.sh"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--chat", action="store_true", help="read questions from the terminal")
    parser.add_argument(
        "--tiny", action="store_true", help="use the embedded pair, which needs no download"
    )
    parser.add_argument("--model-path", help="a target of your own")
    parser.add_argument("--draft-model-path", help="its drafter")
    options = parser.parse_args()
    pair = choose_pair(parser, options)
    tokenizer = read_tokenizer(pair)
    with ExitStack() as running:
        dflash = pair.serve()
        running.callback(dflash.stop)
        if options.chat:
            wait_with_clock(dflash)
            chat(dflash, tokenizer)
            return
        plain = pair.serve(plain=True)
        running.callback(plain.stop)
        wait_with_clock(plain, dflash)
        demonstrate(plain, dflash, tokenizer, pair.questions)


def choose_pair(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Pair:
    given = options.model_path, options.draft_model_path
    if any(given) and not all(given):
        parser.error("--model-path and --draft-model-path make a pair: pass both, or neither")
    if options.tiny and any(given):
        parser.error(
            "--tiny is a pair of its own: drop it, or drop --model-path and --draft-model-path"
        )
    if all(given):
        return Pair(*given)
    try:
        return tiny_pair() if options.tiny else smollm2_pair()
    except FileNotFoundError as error:
        sys.exit(f"demo: {error}")


def tiny_pair() -> Pair:
    return Pair(str(tiny_target()), str(tiny_drafter()), is_tiny=True)


def smollm2_pair() -> Pair:
    """Return the pair of SmolLM2, or say why it cannot be had and return the embedded one."""
    # before the target, which may be a download
    drafter = str(smollm2_drafter())
    try:
        return Pair(str(smollm2_target()), drafter, CPU_BLOCK)
    except RuntimeError as error:
        announced = "The embedded toy pair is shown instead of SmolLM2-135M-Instruct"
        print(f"{announced}: {error}", flush=True)
        return tiny_pair()


def read_tokenizer(pair: Pair) -> Any:
    """Return the target's tokenizer; exit with a message if the pair is incomplete."""
    from transformers import AutoTokenizer

    try:
        check_checkpoint(pair.target, role="target")
        check_checkpoint(pair.drafter, role="drafter")
        return AutoTokenizer.from_pretrained(pair.target)
    except (ValueError, OSError) as error:
        sys.exit(f"demo: {error}")


def demonstrate(plain: Server, dflash: Server, tokenizer: Any, questions: tuple[str, ...]) -> None:
    """Answer the questions with both servers, then show speed and acceptance."""
    console = Console(highlight=False)
    servers = {PLAIN: plain, DFLASH: dflash}

    def ask(question: str, told: Told, max_tokens: int = MAX_TOKENS) -> Iterator[Piece]:
        return stream_pieces(
            servers[told.name].url,
            tokenizer,
            [{"role": "user", "content": question}],
            max_tokens=max_tokens,
            answer=told.answer,
            drafting=told.name == DFLASH,
        )

    for name in servers:
        # the first request of a server is slower
        list(ask(questions[0], Told(name), WARM_UP_TOKENS))
    marked = f"[{ACCEPTED}]green[/]" if console.is_terminal else "in ⟦ ⟧"
    console.print(
        f"Both answer each question, one after the other: on this machine they would slow each "
        f"other. Accepted drafts are {marked}.",
        soft_wrap=not console.is_terminal,
    )
    before = dflash.acceptance()
    told = tell_all(console, questions, ask=ask)
    if not all(one.answer.is_split_exactly for one in told[DFLASH]):
        console.print(f"\n{MERGED}")
    report(console, told, before, dflash.acceptance())


def tell_all(
    console: Console, questions: tuple[str, ...], *, ask: Callable[[str, Told], Iterator[Piece]]
) -> dict[str, list[Told]]:
    """Show how both systems answer the questions, until ANSWERS_S have passed, but at least the
    first one. Return the answers: as many of one system as of the other."""
    told: dict[str, list[Told]] = {PLAIN: [], DFLASH: []}
    began = time.monotonic()
    for asked, question in enumerate(questions):
        if asked and time.monotonic() - began >= ANSWERS_S:
            console.print(
                f"\n{asked} of {len(questions)} questions answered: no more are asked after "
                f"{ANSWERS_S} s."
            )
            break
        console.print(f"\n> {question}", style="bold", markup=False)
        both = Told(PLAIN), Told(DFLASH)
        tell_both(console, *both, ask=partial(ask, question))
        for one in both:
            told[one.name].append(one)
    return told


def chat(dflash: Server, tokenizer: Any) -> None:
    """Answer typed questions, with the chat so far as context, until the input ends."""
    print("Ask something; an empty line starts a new chat, Ctrl-D quits.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        if not question:
            messages = []
            continue
        messages.append({"role": "user", "content": question})
        answer = tell(dflash, tokenizer, messages)
        messages.append({"role": "assistant", "content": answer.text})
        steps = max(answer.verify_steps, 1)
        print(f"(accept length {(answer.tokens - 1) / steps:.2f} over {steps} verify steps)")


def tell(server: Server, tokenizer: Any, messages: list[dict[str, str]]) -> Answer:
    """Stream an answer to stdout, with accepted drafts highlighted."""
    answer = Answer()
    show(stream_pieces(server.url, tokenizer, messages, max_tokens=MAX_CHAT_TOKENS, answer=answer))
    if not answer.is_split_exactly:
        print(MERGED)
    return answer


def wait_with_clock(*servers: Server) -> None:
    """Wait for the servers, showing a clock and the latest log line; exit with the log's tail if
    one does not start."""
    start = time.monotonic()

    def tick() -> None:
        if not sys.stdout.isatty():
            return
        lines = servers[-1].log().splitlines()
        last = next((line for line in reversed(lines) if line.startswith("[")), "")
        message = last.partition("] ")[2][:70]
        print(f"\r\033[Kstarting, {time.monotonic() - start:3.0f} s  {message}", end="")

    try:
        for server in servers:
            server.wait(on_wait=tick)
    except RuntimeError as error:
        sys.exit(f"demo: {error}")
    clear_line()
    print(f"ready after {time.monotonic() - start:.0f} s")


def clear_line() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="")


def report(
    console: Console, told: dict[str, list[Told]], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Show the speed over all questions and the acceptance since `before`, as bars."""
    rates = {
        name: sum(one.answer.tokens for one in all_) / sum(one.seconds for one in all_)
        for name, all_ in told.items()
    }
    ratio = rates[DFLASH] / rates[PLAIN]
    texts = {name: f"{rate:.1f} tokens/s" for name, rate in rates.items()}
    texts[DFLASH] += f", {ratio:.2f}x"
    console.print("\nspeed, one request at a time, on this machine, in this run:", style="bold")
    console.print(bars(rates, room=console.width, texts=texts, styles=SPEED_COLOURS))
    pairs = list(zip(told[PLAIN], told[DFLASH], strict=True))
    equal = sum(one.answer.token_ids == other.answer.token_ids for one, other in pairs)
    console.print(f"{equal} of {len(pairs)} answers are equal, token for token")

    counts = [b - a for a, b in zip(before["histogram"], after["histogram"], strict=True)]
    steps = sum(counts)
    committed = sum((k + 1) * n for k, n in enumerate(counts))
    console.print(
        f"\naccept length {committed / steps:.2f}: {committed} tokens in {steps} verify steps, "
        "by tokens committed per step:",
        style="bold",
        soft_wrap=True,
    )
    most = max(k for k, count in enumerate(counts, start=1) if count)
    shown = {f"{k:2d}": count / steps for k, count in enumerate(counts[:most], start=1)}
    shares = {name: f"{share:.0%}" for name, share in shown.items()}
    styles = dict.fromkeys(shown, ACCEPTED)
    console.print(bars(shown, room=console.width, texts=shares, styles=styles))


if __name__ == "__main__":
    sys.exit(end_on_interrupt("demo", main))
