"""The pairs as one file, for installations without a checkout.

    python -m sglang_dflash.pairs.release_file pack dist/     # in a checkout
    python -m sglang_dflash.pairs.release_file unpack FILE    # beside a wheel

The wheel has no weights. Unpacked in the default folder, the pairs are found from anywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from sglang_dflash import __version__
from sglang_dflash.command_help import parser_of
from sglang_dflash.environment import PAIRS
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs import BESIDE_THE_PACKAGE, UNPACKED

# model -> sha256 of its weights; cards and configs are not checked, they may be reworded
WEIGHTS = {
    "smollm2_dflash": "952eb8c6092b89d0901c5d62d33fdee0fee458a67b61c5ee335074ec2eaa1e34",
    "tiny/drafter": "5f00f9d029a2a969302bc8824d1923dd8d67883fb147e56ad1730baa5b431f97",
    "tiny/target": "4fcef86a27f8983acff734183fb680174231fbe051d0ff0dd6c1e355b274aa4a",
}
FILES = (
    "smollm2_dflash/README.md",
    "smollm2_dflash/config.json",
    "smollm2_dflash/model.safetensors",
    "tiny/README.md",
    "tiny/drafter/config.json",
    "tiny/drafter/model.safetensors",
    "tiny/target/config.json",
    "tiny/target/generation_config.json",
    "tiny/target/model.safetensors",
    "tiny/target/tokenizer.json",
    "tiny/target/tokenizer_config.json",
)
MODELS = ("smollm2_dflash", "tiny")
NAME = f"sglang_dflash-pairs-{__version__}.tar.gz"


def pack(source: Path, out: Path) -> Path:
    """Write the release file of the pairs in `source` into the folder `out`."""
    check(source)
    make_folder(out)
    # weights hardly shrink: a low level saves seconds and costs no size
    with tarfile.open(out / NAME, "w:gz", compresslevel=1) as archive:
        for name in FILES:
            archive.add(source / name, arcname=name)
    return out / NAME


def unpack(file: Path, out: Path) -> None:
    """Unpack a release file, whose pairs appear in `out` when all are complete and checked, in
    place of earlier ones. Raise ValueError if anything else is there."""
    make_folder(out)
    refuse_others(out)
    with tempfile.TemporaryDirectory(dir=out) as work:
        try:
            with tarfile.open(file) as archive:
                for name in FILES:
                    copy_member(archive, name, Path(work))
        except (OSError, EOFError, KeyError, tarfile.TarError) as error:
            raise ValueError(
                f"{file} is not a release file of the pairs: {error}. Pass the file {NAME} of the "
                f"release {__version__}, or download it again."
            ) from None
        check(Path(work))
        for name in MODELS:
            if (out / name).exists():
                (out / name).rename(Path(work) / f"earlier {name}")
            (Path(work) / name).rename(out / name)


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be made: {error.strerror}. Name a folder, not a file, in a place where "
            "you may write."
        ) from None


def refuse_others(out: Path) -> None:
    """Raise ValueError if a file would be lost that no release file has."""
    for name in MODELS:
        files = [path for path in (out / name).rglob("*") if not path.is_dir()]
        kept = sorted(str(path.relative_to(out)) for path in files)
        if others := [path for path in kept if path not in FILES]:
            raise ValueError(
                f"{out} has {others[0]}, which is not of the pairs, and {name} would be replaced "
                "as a whole. Pass another --out."
            )


def copy_member(archive: tarfile.TarFile, name: str, folder: Path) -> None:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(f"{name} is not a file")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with member, (folder / name).open("wb") as made:
        shutil.copyfileobj(member, made)


def check(folder: Path) -> None:
    """Raise ValueError unless the folder has every file, and the weights of this release."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing)}. Pack the folder sglang_dflash/pairs of a "
            "checkout."
        )
    for name, expected in WEIGHTS.items():
        with (folder / name / "model.safetensors").open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise ValueError(
                f"The weights of {name} have sha256 {found}, but sglang_dflash {__version__} "
                f"expects {expected}. Use the pairs of that release."
            )


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, prog="python -m sglang_dflash.pairs.release_file")
    commands = parser.add_subparsers(dest="command", required=True, help="what to do")
    packing = commands.add_parser("pack", help="write the release file")
    packing.add_argument("out", type=Path, help="folder for it")
    packing.add_argument(
        "--pairs", type=Path, default=BESIDE_THE_PACKAGE, help="default: those of this checkout"
    )
    unpacking = commands.add_parser("unpack", help="make the pairs available to this user")
    unpacking.add_argument("file", type=Path, help="what pack has written")
    unpacking.add_argument("--out", type=Path, default=UNPACKED, help=f"default: {UNPACKED}")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    try:
        if options.command == "pack":
            print(pack(options.pairs, options.out))
            return 0
        unpack(options.file, options.out)
    except ValueError as error:
        print(f"release_file: {error}", file=sys.stderr)
        return 1
    print(options.out)
    if options.out != UNPACKED:
        print(f"set {PAIRS}={options.out} to use them")
    return 0


if __name__ == "__main__":
    sys.exit(end_on_interrupt("release_file", main))
