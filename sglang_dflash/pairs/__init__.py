"""The project's own pairs: the tiny one, and a drafter for SmolLM2.

Their weights are in the repository and in a release file, not in the wheel. Nothing is downloaded
here: a pair is found on this machine, or the error says how to get it.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.environment import PAIRS, Environment

# a checkout, or an editable install of one
BESIDE_THE_PACKAGE = Path(__file__).resolve().parent
# where `python -m sglang_dflash.pairs.release_file unpack` puts them
UNPACKED = Path.home() / ".cache" / "sglang_dflash" / "pairs"


def tiny_target() -> Path:
    """Return the folder of the embedded target."""
    return find_model("tiny/target")


def tiny_drafter() -> Path:
    """Return the folder of the drafter trained for the embedded target."""
    return find_model("tiny/drafter")


def smollm2_drafter() -> Path:
    """Return the folder of the drafter for the target of `pairs.smollm2`."""
    return find_model("smollm2_dflash")


def find_model(name: str) -> Path:
    """Return the folder of a model. FileNotFoundError says where it was looked for."""
    places = places_to_look()
    for place in places:
        if (place / name / "model.safetensors").is_file():
            return place / name
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"The model {name} of sglang_dflash is not in {looked}. Its weights are in the repository "
        f"and in the release file of the pairs, not in the wheel: run this in a checkout, set "
        f"{PAIRS} to the folder sglang_dflash/pairs of one, or unpack the release file with "
        "`python -m sglang_dflash.pairs.release_file unpack FILE`."
    )


def places_to_look() -> list[Path]:
    """Return the folders that may have the pairs; a folder that the user names is the only one."""
    given = Environment().pairs_folder
    if given is not None:
        return [given]
    in_checkout = Path.cwd() / "sglang_dflash" / "pairs"
    return list(dict.fromkeys((BESIDE_THE_PACKAGE, in_checkout, UNPACKED)))
