"""`python -m sglang_dflash plain-towers TARGET`: a 4-bit Gemma 4 whose towers SGLang leaves alone.

Published compressed-tensors checkpoints of Gemma 4 keep the tower for images in bf16, and list its
layers one by one, with names that end in `.linear`. SGLang fuses some of these layers under names
without it, takes them for quantised, and fails while it loads (sgl-project/sglang#28018). A pattern
covers every name. So a folder is made that has links to the checkpoint's files, and a config.json
with the patterns added. A server argument cannot do it: SGLang applies an override of the config to
the drafter as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub

from sglang_dflash.commands.config_file import read_config_file

CACHE = Path.home() / ".cache" / "sglang_dflash" / "targets"
TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def run_plain_towers(options: argparse.Namespace) -> int:
    """Print the folder to serve; return 1 if the checkpoint is of another kind."""
    try:
        source = find(options.target)
        folder = Path(options.to) if options.to else CACHE / cache_name(options.target)
        print(make_folder(source, folder))
    except (OSError, ValueError) as error:
        print(f"{options.target}: {error}", file=sys.stderr)
        return 1
    return 0


def find(target: str) -> Path:
    """Return the checkpoint's folder, downloaded if need be."""
    if Path(target).is_dir():
        return Path(target)
    try:
        # what is no model name either is a ValueError of the Hub's
        return Path(huggingface_hub.snapshot_download(target))
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"there is no such folder, and no model to download ({reason}). Pass a checkpoint's "
            "folder, or a model name you have access to."
        ) from None


def cache_name(target: str) -> str:
    """Return the name of the folder to make. Two folders of the same name have their own."""
    folder = Path(target)
    if not folder.is_dir():
        return target.replace("/", "--")
    path = folder.resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def make_folder(source: Path, folder: Path) -> Path:
    """Make the folder from a checkpoint's, or bring it up to date."""
    read = read_config_file(source, wanted="a checkpoint's folder, or a model name")
    config = json.dumps(with_patterns(read), indent=1)
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is the checkpoint itself. Pass another folder with --to.")
    links = links_to_replace(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    for link in links:
        link.unlink()
    # before the links: they are taken for ours by the file beside them
    (folder / "config.json").write_text(config)
    for file in sorted(source.iterdir()):
        if file.name != "config.json" and not file.is_dir():
            (folder / file.name).symlink_to(file.resolve())
    return folder


def links_to_replace(folder: Path, config: str) -> list[Path]:
    """Return the links of an earlier run, also those whose files are gone. Raise ValueError for a
    folder that this program has not made: it has links and one file, its own config.json."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass another path with --to.")
    links = [entry for entry in sorted(folder.iterdir()) if entry.is_symlink()]
    others = [entry for entry in sorted(folder.iterdir()) if not entry.is_symlink()]
    own = folder / "config.json"
    is_ours = others == [own] and own.is_file() and (links or own.read_text() == config)
    if not is_ours and (links or others):
        found = [entry.name for entry in (others or links)]
        raise ValueError(
            f"{folder} has files that plain-towers has not made ({', '.join(found[:3])}"
            f"{', ...' if len(found) > 3 else ''}). Pass a new folder with --to."
        )
    return links


def with_patterns(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that leaves out, by pattern, each tower of which it leaves out layers."""
    scheme = config.get("quantization_config") or {}
    method = scheme.get("quant_method", "none") if isinstance(scheme, dict) else repr(scheme)
    if method != "compressed-tensors":
        raise ValueError(
            f"its config.json has quantization method {method}, not compressed-tensors. Serve it "
            "as it is."
        )
    ignored = scheme.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ValueError(
            f"quantization_config.ignore in its config.json is {str(ignored)[:60]}, not a list of "
            "names. Download it again."
        )
    found = [tower for tower in TOWERS if any(tower in name for name in ignored)]
    patterns = [f"re:.*{tower}.*" for tower in found if f"re:.*{tower}.*" not in ignored]
    return {**config, "quantization_config": {**scheme, "ignore": [*ignored, *patterns]}}
