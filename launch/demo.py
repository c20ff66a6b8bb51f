"""Serve a pair on this machine, ask it questions, and show what DFlash does.

    python launch/demo.py           # plain decoding and DFLASH side by side, speed and acceptance
    python launch/demo.py --chat    # ask your own questions
    python launch/demo.py --model-path M --draft-model-path D    # a pair of your own

The pair is SmolLM2-135M-Instruct, downloaded once (93 MB), and the drafter in this package; with
--tiny it is the embedded toy pair, which needs no download. Two servers, with and without
speculation, answer each question in turn, so that neither slows the other; on a GPU if torch can
use one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from sglang_dflash.checkpoint import check_checkpoint
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chat", action="store_true", help="read questions from the terminal")
    parser.add_argument(
        "--tiny", action="store_true", help="use the embedded pair, which needs no download"
    )
    parser.add_argument("--model-path", help="a target of your own")
    parser.add_argument("--draft-model-path", help="its drafter")
    pair = choose_pair(parser, options := parser.parse_args())
    tokenizer = read_tokenizer(pair)
    dflash = pair.serve()
    plain = None if options.chat else pair.serve(plain=True)
    servers = [dflash] if plain is None else [plain, dflash]
    try:
        wait_with_clock(*servers)
        if plain is None:
            chat(dflash, tokenizer)
        else:
            demonstrate(plain, dflash, tokenizer, pair.questions)
    except KeyboardInterrupt:
        print("\nstopped")
        sys.exit(130)
    finally:
        for server in servers:
            server.stop()


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
        if options.tiny:
            return Pair(str(tiny_target()), str(tiny_drafter()), is_tiny=True)
        # before the target, which may be a download
        drafter = str(smollm2_drafter())
        return Pair(str(smollm2_target()), drafter, CPU_BLOCK)
    except FileNotFoundError as error:
        sys.exit(f"demo: {error}")
    except RuntimeError as error:
        sys.exit(f"demo: {error} `python launch/demo.py --tiny` needs no download.")


def read_tokenizer(pair: Pair) -> Any:
    """Return the target's tokenizer; exit with a message if the pair is incomplete."""
    try:
        check_checkpoint(pair.target, role="target")
        check_checkpoint(pair.drafter, role="drafter")
        return AutoTokenizer.from_pretrained(pair.target)
    except (ValueError, OSError) as error:
        sys.exit(f"demo: {error}")


def demonstrate(plain: Server, dflash: Server, tokenizer: Any, questions: tuple[str, ...]) -> None:
    """Answer each question with both servers, then show speed and acceptance."""
    console = Console(highlight=False)
    servers = {PLAIN: plain, DFLASH: dflash}

    def pieces(told: Told, question: str, max_tokens: int) -> Iterator[Piece]:
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
        list(pieces(Told(name), questions[0], WARM_UP_TOKENS))
    marked = f"[{ACCEPTED}]green[/]" if console.is_terminal else "in ⟦ ⟧"
    console.print(
        f"Both answer each question, one after the other: on this machine they would slow each "
        f"other. Accepted drafts are {marked}.",
        soft_wrap=not console.is_terminal,
    )
    before = dflash.acceptance()
    told: dict[str, list[Told]] = {PLAIN: [], DFLASH: []}
    for question in questions:
        console.print(f"\n> {question}", style="bold", markup=False)
        both = Told(PLAIN), Told(DFLASH)
        tell_both(console, *both, ask=partial(pieces, question=question, max_tokens=MAX_TOKENS))
        for one in both:
            told[one.name].append(one)
    if not all(one.answer.is_split_exactly for one in told[DFLASH]):
        console.print(f"\n{MERGED}")
    report(console, told, before, dflash.acceptance())


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
    console.print(bars(rates, room=console.width, texts=texts))
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
    console.print(bars(shown, room=console.width, texts=shares, style=ACCEPTED))


if __name__ == "__main__":
    main()
