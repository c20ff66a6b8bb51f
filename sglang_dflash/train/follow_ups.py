"""Talks from single questions: adds later turns of a user, to be asked after the target's answers.

    python -m sglang_dflash.train.follow_ups prompts.jsonl --turns 2 --out talks.jsonl

A drafter that serves chats should be trained on them. The turns are requests that fit any answer
before them: to shorten, explain, rewrite, translate, go on. Which ones follow a prompt depends on
its text and `--seed` only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.train.output_file import check_writable
from sglang_dflash.train.prompts import read_chats

FOLLOW_UPS = (
    "Summarise your answer in two sentences.",
    "Explain that to a ten-year-old.",
    "Rewrite your answer as a numbered list.",
    "Which part of your answer are you least sure of, and why?",
    "Give me another example, different from the first.",
    "Now argue the opposite.",
    "Turn your answer into a short e-mail to a colleague.",
    "Go on.",
    "Explain the second point in more detail.",
    "What would change if the numbers were ten times as large?",
    "Put the main facts into a table.",
    "Write the same in a more formal tone.",
    "Write the same in a casual tone, with at most 80 words.",
    "What are three questions that I should ask next?",
    "Are there any mistakes in your answer? Correct them.",
    "Show each step of your reasoning.",
    "Translate your answer into Spanish.",
    "Translate your answer into German.",
    "Give the result as JSON with suitable keys.",
    "Solve it again in another way.",
    "Write Python code that does this, with a short explanation.",
    "Write unit tests for it.",
    "What are the advantages and disadvantages of this approach?",
    "Compare it with the most common alternative.",
    "Write a story of about 200 words on this topic.",
    "Make it longer, with more detail in every paragraph.",
    "Shorten it to half of its length.",
    "Give me a plan with dates for the next four weeks.",
    "Write a title and five keywords for it.",
    "How would an expert in the field put it?",
)


def talks_of(path: Path, *, turns: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the chats of a prompt file; those without later turns get some."""
    for chat in read_chats(path):
        text = chat.messages[-1]["content"]
        later = chat.later or tuple(Random(f"{seed}-{text}").sample(FOLLOW_UPS, turns))
        yield {"messages": chat.messages, "later": list(later)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("prompts", nargs="+", type=Path, help="files as for train --prompts")
    parser.add_argument("--turns", type=int, default=2, help="later turns of each talk; default: 2")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of turns; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL for train --prompts")
    options = parser.parse_args()
    if not 1 <= options.turns <= len(FOLLOW_UPS):
        parser.error(f"--turns {options.turns}: pass 1 to {len(FOLLOW_UPS)}")
    try:
        check_writable(options.out, option="--out")
        rows = [
            json.dumps(row)
            for path in options.prompts
            for row in talks_of(path, turns=options.turns, seed=options.seed)
        ]
        options.out.write_text("".join(f"{row}\n" for row in rows))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(rows)} talks in {options.out}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("follow_ups", main))
