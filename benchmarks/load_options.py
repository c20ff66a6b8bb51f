"""The arguments of `benchmarks.load`, and what is wrong with them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from benchmarks import ROOT, batch_load, result_files, sharing, systems
from sglang_dflash.command_help import parser_of

SHAPES = ROOT / "benchmarks" / "shapes"
REQUESTS = (1, 4, 8, 16, 32, 64, 128, 256)
PROFILES = ("accept2", "accept4.2", "accept6", "accept8", "accept2+accept8", "recorded", "accept1")
SYSTEMS = ("plain", "ours-16", "ours")
PART = re.compile(r"recorded|accept\d+(\.\d+)?")


def profile_name(word: str) -> str:
    if all(PART.fullmatch(part) for part in word.split("+")):
        return word
    raise argparse.ArgumentTypeError(
        f"{word!r} is not recorded, acceptLENGTH such as accept4.2, or several of these joined by +"
    )


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = parser_of(doc)
    _add_pair_options(parser)
    _add_point_options(parser)
    _add_window_options(parser)
    sharing.add_options(parser)
    batch_load.add_port_option(parser)
    batch_load.add_budget_option(parser)
    parser.add_argument("--into", type=Path, help="add to the results in this file, and to OUT")
    result_files.add_result_options(parser, picture=True)
    return parser


def _add_pair_options(parser: argparse.ArgumentParser) -> None:
    known = sorted(path.name for path in SHAPES.iterdir() if not path.name.endswith("-draft"))
    parser.add_argument(
        "--shapes",
        choices=known,
        help="pair of benchmarks/shapes, with random weights; default: gemma4-31b on a GPU, else "
        "the embedded pair",
    )
    parser.add_argument("--model-path", help="target of another pair: a folder or a model name")
    parser.add_argument("--draft-model-path", help="its drafter: a folder or a model name")
    parser.add_argument("--load-format", help="of SGLang; default: dummy with --shapes, else auto")
    parser.add_argument(
        "--ours-args",
        default="",
        help="further server arguments, quoted, for ours and ours-uniform; default: none",
    )
    systems.add_backend_option(parser)


def _add_point_options(parser: argparse.ArgumentParser) -> None:
    systems.add_systems_option(parser, systems.name_of_width, SYSTEMS, nargs="*")
    parser.add_argument(
        "--in-tree",
        nargs="+",
        type=float,
        metavar="LENGTH",
        help="also SGLang's DFLASH, with a server for each simulated accept length; default: none",
    )
    batch_load.add_requests_option(parser, REQUESTS)
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=profile_name,
        default=list(PROFILES),
        help=f"acceptance to simulate; default: {' '.join(PROFILES)}",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="tokens of a prompt, with --profiles; default: %(default)s",
    )
    parser.add_argument("--prompts", nargs="+", type=Path, help="jsonl files of real questions")
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=float,
        default=[0.0],
        help="of sampling, with --prompts; default: 0",
    )


def _add_window_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-tokens",
        type=int,
        default=32,
        help="generated tokens at which a timed stretch begins; default: %(default)s",
    )
    parser.add_argument(
        "--to-tokens",
        type=int,
        default=160,
        help="generated tokens at which it ends; default: %(default)s",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="least seconds of a window; default: %(default)g"
    )
    parser.add_argument(
        "--warm-seconds",
        type=float,
        default=2.0,
        help="most seconds to warm up; default: %(default)g",
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="most timed rounds of a point; default: %(default)s"
    )


def complaint(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments; None if nothing."""
    asked = f"--from-tokens {options.from_tokens} --to-tokens {options.to_tokens}"
    real, is_pair = bool(options.prompts), bool(options.model_path)
    absent = [path for path in options.prompts or () if not path.is_file()]
    wrong = {
        "--model-path and --draft-model-path go together: pass both or neither": (
            is_pair != bool(options.draft_model_path)
        ),
        f"{asked}: the second must be the larger one": (
            not 0 <= options.from_tokens < options.to_tokens
        ),
        f"--prompts {' '.join(map(str, absent))}: no such file": absent,
        "--in-tree LENGTH is for simulated acceptance: without --prompts": real and options.in_tree,
        "--systems in-tree is for real questions (--prompts): pass --in-tree LENGTH": (
            "in-tree" in options.systems and not real
        ),
        "--temperatures is for real questions (--prompts)": (
            not real and options.temperatures != [0.0]
        ),
        f"--rounds {options.rounds}: pass 2 or more, for there are two windows": options.rounds < 2,
        f"--into {options.into}: no such file. Pass --out for the first call": (
            options.into and not options.into.is_file()
        ),
        "--prompts: name a pair by --model-path and --draft-model-path": (
            real and not is_pair and torch.cuda.is_available()
        ),
    }
    return next((message for message, is_so in wrong.items() if is_so), None)
