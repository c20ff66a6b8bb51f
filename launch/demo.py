"""Serve a pair on this machine, ask it questions, and show what DFlash does.

    python launch/demo.py           # questions, acceptance, and speed against plain decoding
    python launch/demo.py --chat    # ask your own questions
    python launch/demo.py --model-path M --draft-model-path D    # a pair of your own

The pair is SmolLM2-135M-Instruct, downloaded once (93 MB), and the drafter in this package; with
--tiny it is the embedded toy pair, which needs no download. Two servers run side by side, with and
without speculation, so that the speeds come from one run; on a GPU if torch can use one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.pairs import smollm2_drafter, tiny_drafter, tiny_target
from sglang_dflash.pairs.smollm2 import smollm2_target
from sglang_dflash.testing.server import Server
from sglang_dflash.testing.stream import Answer, show, stream_pieces

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
ROUNDS = 3
PATIENCE_S = 60  # no further round starts after this
MAX_TOKENS = 300
# a CPU computes a block's rows one after another: more of them cost more than they gain
CPU_BLOCK = 6
BAR_WIDTH = 40


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


class Speed(NamedTuple):
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


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
    print("Accepted drafts are green, the target's own tokens are not (⟦ ⟧ without a terminal).")
    before = dflash.acceptance()
    for question in questions:
        print(f"\n> {question}")
        tell(dflash, tokenizer, [{"role": "user", "content": question}])
    print()
    speeds = measure(plain, dflash, questions)
    report(before, dflash.acceptance(), speeds)


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
    show(stream_pieces(server.url, tokenizer, messages, max_tokens=MAX_TOKENS, answer=answer))
    if not answer.is_split_exactly:
        print(
            "(some steps arrived as one chunk: of those only the last token is marked as the "
            "target's)"
        )
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


def ask(server: Server, question: str) -> Speed:
    """Stream an answer through the OpenAI client and time it."""
    start = time.monotonic()
    tokens = 0
    for chunk in server.client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return Speed(tokens, time.monotonic() - start)


def measure(plain: Server, dflash: Server, questions: tuple[str, ...]) -> dict[str, Speed]:
    """Ask both servers the same questions in turn; the best round of each counts."""
    best: dict[str, Speed] = {}
    start = time.monotonic()
    for i in range(ROUNDS):
        if i and time.monotonic() - start > PATIENCE_S:
            break
        clear_line()
        if sys.stdout.isatty():
            print(f"measuring, round {i + 1} of {ROUNDS}", end="", flush=True)
        for name, server in (("plain decoding", plain), ("DFlash", dflash)):
            answers = [ask(server, question) for question in questions]
            total = Speed(sum(a.tokens for a in answers), sum(a.seconds for a in answers))
            if name not in best or total.rate > best[name].rate:
                best[name] = total
    clear_line()
    return best


def report(before: dict[str, Any], after: dict[str, Any], speeds: dict[str, Speed]) -> None:
    counts = [b - a for a, b in zip(before["histogram"], after["histogram"], strict=True)]
    steps = sum(counts)
    committed = sum((k + 1) * n for k, n in enumerate(counts))
    print(f"accept length {committed / steps:.2f}: {committed} tokens in {steps} verify steps")
    print("tokens committed per step:")
    for k, count in enumerate(counts):
        bar = "#" * round(BAR_WIDTH * count / max(counts))
        print(f"  {k + 1:2d}  {count:5d}  {bar}")
    print("speed, one request at a time, best round:")
    for name, speed in speeds.items():
        print(f"  {name:15s} {speed.rate:7.1f} tokens/s")
    ratio = speeds["DFlash"].rate / speeds["plain decoding"].rate
    print(f"  DFlash is {ratio:.2f}x plain decoding on this machine, in this run")


if __name__ == "__main__":
    main()
