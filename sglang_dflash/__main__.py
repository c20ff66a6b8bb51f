"""`sglang-dflash doctor | serve | tune | report | train | convert | drafters | cards |
plain-towers`; also as `python -m sglang_dflash`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

from sglang_dflash import __version__
from sglang_dflash.command_help import examples
from sglang_dflash.commands.argument_types import (
    KV_TYPES,
    count_or_none,
    memory_size,
    positive,
    ratio,
    seconds,
    share,
)
from sglang_dflash.commands.card_names import CARDS, FRACTION, SLIDING_SHARE, card_named
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.train.arguments import add_train_options, read_invocation
from sglang_dflash.train.config import Invocation
from sglang_dflash.train.stop import Stop, run_until_stopped

# required dependencies: no command runs without them
NEEDED = ("torch", "transformers", "requests", "sglang", "huggingface_hub")
# commands that import it, as the only slow thing they do before a first answer
LOAD_SGLANG = ("doctor", "serve", "tune", "drafters", "cards")
MODULE = "python -m sglang_dflash"
EXAMPLES = """\
%(prog)s doctor --card 5090
%(prog)s serve --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH \\
    --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16
%(prog)s report --web"""
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def run_script() -> int:
    """The installed command `sglang-dflash`."""
    return main(prog="sglang-dflash")


def main(arguments: list[str] | None = None, *, prog: str = MODULE) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(prog)
    options, others = parser.parse_known_args(arguments)
    options.server_args = others
    if others and options.command not in ("serve", "tune"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        return end_on_interrupt(options.command, lambda: run(options, arguments))
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        parser.exit(1, f"{sys.executable} has no {error.name}. Use a Python that has SGLang.\n")


def make_parser(prog: str = MODULE) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="DFlash speculative decoding for SGLang: checks, serving, monitoring, training",
        epilog="`%(prog)s COMMAND --help` has the options of a command, with an example.\n\n"
        + examples(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-dflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add_doctor(commands)
    add_serve(commands)
    add_tune(commands)
    add_report(commands)
    train = add_command(
        commands,
        "train",
        "train a drafter for a target",
        "--model-path Qwen/Qwen3-4B --prompts prompts.jsonl --out drafter-run --minutes 30",
    )
    add_train_options(train)
    add_convert(commands)
    add_command(
        commands, "drafters", "print which released drafters are served, and why others are not", ""
    )
    add_plain_towers(commands)
    add_command(commands, "cards", "print what fits cards of 24 to 180 GB, as a table", "")
    return parser


def add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        "check the installation, and whether a pair fits",
        "--model-path Qwen/Qwen3-8B --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 "
        "--gpu-memory-gb 79.1",
        more="Without a pair, the released pairs that fit the card are proposed: --card 5090",
    )
    add_pair_options(doctor, by_card=True)
    doctor.add_argument(
        "--gpu-memory-gb",
        type=memory_size,
        help="plan for a card of this size, not the local one: GiB as the driver reports them (an "
        '"80 GB" card has 79.1)',
    )
    doctor.add_argument(
        "--card",
        type=card_named,
        help=f"plan for this card; without a pair, propose one that fits: {', '.join(CARDS)}",
    )
    doctor.add_argument(
        "--contract",
        action="store_true",
        help="list everything that is used of SGLang, and what has moved in this release",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")


def add_serve(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        "run SGLang's server with any of its arguments, if the doctor's checks pass",
        "--model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH "
        "--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 --port 30000",
        more="Other arguments are passed on to SGLang's server: see python -m "
        "sglang.launch_server --help",
    )
    add_pair_options(serve)
    serve.set_defaults(gpu_memory_gb=None, card=None, contract=False)


def add_tune(commands: Commands) -> None:
    tune = add_command(
        commands,
        "tune",
        "find the fastest settings for this machine, a pair and a load, by measuring",
        "--model-path Qwen/Qwen3-8B --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 "
        "--requests 1 16 --prompts my-prompts.jsonl",
        more="Every trial starts a server, so it takes minutes. Other arguments are passed on to "
        "the servers.",
    )
    add_pair_options(tune)
    tune.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        help="questions to ask, one per line, as for train; default: a dozen built-in ones",
    )
    tune.add_argument(
        "--requests",
        nargs="+",
        type=positive,
        default=[1, 8],
        help="concurrent requests; default: 1 8",
    )
    tune.add_argument(
        "--max-tokens",
        type=positive,
        default=256,
        help="limit for an answer; default: %(default)s",
    )
    tune.add_argument(
        "--blocks",
        nargs="+",
        type=int,
        help="block sizes to try; default: the drafter's own, a half and a quarter of it",
    )
    tune.add_argument(
        "--widths",
        nargs="+",
        choices=["auto", "full"],
        default=["auto", "full"],
        help="verify widths to try; full: all of the block in each step; default: auto full",
    )
    tune.add_argument("--out", type=Path, help="also write the trials to this file, as JSON")
    tune.set_defaults(gpu_memory_gb=None, card=None)


def add_report(commands: Commands) -> None:
    report = add_command(
        commands,
        "report",
        "live acceptance of a running server",
        "--url http://127.0.0.1:30000 --web",
    )
    report.add_argument(
        "--url",
        nargs="+",
        default=["http://127.0.0.1:30000"],
        help="the server to watch; with --web, one or more; default: port 30000 of this machine",
    )
    report.add_argument(
        "--interval",
        type=seconds,
        default=2.0,
        help="seconds between polls; default: 2",
    )
    report.add_argument(
        "--looks",
        type=count_or_none,
        default=0,
        help="stop after this many polls; default: 0, on Ctrl-C",
    )
    report.add_argument("--png", type=Path, help="also write a plot when it ends, on Ctrl-C too")
    report.add_argument(
        "--web", action="store_true", help="serve a live page instead, until Ctrl-C"
    )
    report.add_argument("--host", help="address of the page; default: 127.0.0.1")
    report.add_argument("--port", type=int, help="port of the page, 0 for any free; default: 8080")


def add_convert(commands: Commands) -> None:
    convert = add_command(
        commands,
        "convert",
        "convert a drafter to the speculators format, or from it",
        "drafter-run/drafter speculators-drafter --model-path Qwen/Qwen3-4B",
    )
    convert.add_argument("source", metavar="SRC", help="the drafter's folder, in either format")
    convert.add_argument("destination", metavar="DST", help="a new folder, for the other format")
    convert.add_argument("--model-path", "--model", help="the drafter's target")


def add_plain_towers(commands: Commands) -> None:
    towers = add_command(
        commands,
        "plain-towers",
        "make a 4-bit Gemma 4 loadable for SGLang, and print the folder to serve",
        "google/gemma-4-31B-it-qat-w4a16-ct",
        more="The folder has links to the checkpoint's files, which are downloaded if need be.",
    )
    towers.add_argument("target", help="a folder or a model name")
    towers.add_argument("--to", help="folder to make; default: one in ~/.cache/sglang_dflash")


def add_command(
    commands: Commands,
    name: str,
    does: str,
    example: str,
    *,
    more: str = "",
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example."""
    shown = examples(f"%(prog)s {example}".rstrip())
    return commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"{more}\n\n{shown}" if more else shown,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the command. Imports are lazy, so that each loads only what it needs."""
    if options.command in LOAD_SGLANG and sys.stderr.isatty():
        told = f"{options.command}: loading SGLang, which takes some seconds"
        print(told, file=sys.stderr, flush=True)
    if options.command == "serve":
        from sglang_dflash.commands.serve import run_serve

        return run_serve(options, arguments[1:])
    if options.command == "doctor":
        from sglang_dflash.commands.doctor import run_doctor

        return run_doctor(options)
    if options.command == "tune":
        from sglang_dflash.commands.tune import run_tune

        return run_tune(options)
    if options.command == "train":
        invocation = read_invocation(options, arguments)
        return run_until_stopped(invocation, lambda stop: run_train(options, invocation, stop))
    if options.command == "convert":
        from sglang_dflash.commands.convert import run_convert

        return run_convert(options)
    if options.command == "drafters":
        from sglang_dflash.commands.drafters import run_drafters

        return run_drafters()
    if options.command == "plain-towers":
        from sglang_dflash.commands.plain_towers import run_plain_towers

        return run_plain_towers(options)
    if options.command == "cards":
        from sglang_dflash.commands.cards import run_cards

        return run_cards()
    if options.web:
        from sglang_dflash.commands.web import run_web

        return run_web(options)
    from sglang_dflash.commands.report import run_report

    return run_report(options)


def run_train(options: argparse.Namespace, invocation: Invocation, stop: Stop) -> int:
    from sglang_dflash.commands import train

    return train.run_train(options, invocation, stop)


def add_pair_options(parser: argparse.ArgumentParser, *, by_card: bool = False) -> None:
    """Add the SGLang options that the checks of a pair and its memory depend on. The two with a
    default stay None: with `by_card` it depends on the card."""
    otherwise = ", or what suits --card" if by_card else ""
    parser.add_argument("--model-path", "--model", help="target: a folder or a model name")
    parser.add_argument("--speculative-draft-model-path", help="drafter: a folder or a model name")
    parser.add_argument(
        "--mem-fraction-static",
        type=share,
        help=f"fraction of GPU memory for weights and KV; default {FRACTION}{otherwise}",
    )
    parser.add_argument(
        "--swa-full-tokens-ratio",
        type=ratio,
        help="tokens in the pool of sliding-window layers, as a fraction of those in the pool of "
        f"the others; default {SLIDING_SHARE}{otherwise}",
    )
    parser.add_argument(
        "--tp-size",
        "--tensor-parallel-size",
        type=positive,
        default=1,
        help="cards that share a model; default: %(default)s",
    )
    parser.add_argument("--quantization", help="how SGLang quantises the target")
    parser.add_argument(
        "--speculative-draft-model-quantization",
        choices=["fp8"],
        help="FP8 weights in the drafter's MLPs and output projections",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_TYPES,
        help="type of the KV cache; of SGLang's, those whose size is known",
    )
    parser.add_argument(
        "--speculative-draft-kv-cache-dtype",
        choices=KV_TYPES,
        help="the same for the drafter alone, with SGLang 0.5.23; default: the target's",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code from the models' repositories"
    )


if __name__ == "__main__":
    sys.exit(main())
