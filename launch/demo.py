"""Serve the embedded pair on this machine, ask it something, and show what DFlash does.

Two servers run side by side, with and without speculation, so that the speeds come from one run.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import NamedTuple

from server import Server

QUESTIONS = (
    "Please tell me a short story about Otto, a curious hare.",
    "Write the 8 times table up to 7.",
    "Describe the island of Hollow as JSON.",
    "Name the months of the year, beginning with March.",
)
ROUNDS = 3
BAR_WIDTH = 40


class Speed(NamedTuple):
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    # SIGTERM unwinds like Ctrl-C, so that the servers are stopped either way
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plain, dflash = Server(plain=True), Server()
    try:
        wait_with_clock(plain, dflash)
        before = dflash.acceptance()
        for question in QUESTIONS:
            print(f"\n\033[1m{question}\033[0m")
            ask(dflash, question, echo=True)
        print()
        speeds = measure(plain, dflash)
        report(before, dflash.acceptance(), speeds)
    except KeyboardInterrupt:
        print("\nstopped")
        sys.exit(130)
    finally:
        plain.stop()
        dflash.stop()


def wait_with_clock(*servers: Server) -> None:
    """Wait for the servers with a running clock and the latest line of their log."""
    start = time.monotonic()

    def tick() -> None:
        lines = servers[-1].log().splitlines()
        last = next((line for line in reversed(lines) if line.startswith("[")), "")
        message = last.partition("] ")[2][:70]
        print(f"\r\033[Kstarting two servers, {time.monotonic() - start:3.0f} s  {message}", end="")

    for server in servers:
        server.wait(on_wait=tick)
    print(f"\r\033[Kservers ready after {time.monotonic() - start:.0f} s")


def ask(server: Server, question: str, *, echo: bool = False) -> Speed:
    """Ask through the OpenAI client, streaming; print the answer as it comes if told to."""
    start = time.monotonic()
    tokens = 0
    for chunk in server.client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=300,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if echo and choice.delta.content:
                print(choice.delta.content, end="", flush=True)
    if echo:
        print()
    return Speed(tokens, time.monotonic() - start)


def measure(plain: Server, dflash: Server) -> dict[str, Speed]:
    """Ask both servers the same questions in turn; the best round of each counts."""
    best: dict[str, Speed] = {}
    for i in range(ROUNDS):
        print(f"\r\033[Kmeasuring, round {i + 1} of {ROUNDS}", end="", flush=True)
        for name, server in (("plain decoding", plain), ("DFlash", dflash)):
            answers = [ask(server, question) for question in QUESTIONS]
            total = Speed(sum(a.tokens for a in answers), sum(a.seconds for a in answers))
            if name not in best or total.rate > best[name].rate:
                best[name] = total
    print("\r\033[K", end="")
    return best


def report(before: dict, after: dict, speeds: dict[str, Speed]) -> None:
    counts = [b - a for a, b in zip(before["histogram"], after["histogram"], strict=True)]
    steps = sum(counts)
    committed = sum((k + 1) * n for k, n in enumerate(counts))
    print(f"accept length {committed / steps:.2f}: {committed} tokens in {steps} verify steps")
    print("tokens committed per step:")
    for k, count in enumerate(counts):
        bar = "#" * round(BAR_WIDTH * count / max(counts))
        print(f"  {k + 1:2d}  {count:5d}  {bar}")
    print("speed, one request at a time, the better of the rounds:")
    for name, speed in speeds.items():
        print(f"  {name:15s} {speed.rate:7.1f} tokens/s")
    ratio = speeds["DFlash"].rate / speeds["plain decoding"].rate
    print(f"  DFlash is {ratio:.2f}x plain decoding on this machine, in this run")


if __name__ == "__main__":
    main()
