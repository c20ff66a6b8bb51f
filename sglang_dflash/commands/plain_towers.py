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
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub

CACHE = Path.home() / ".cache" / "sglang_dflash" / "targets"
TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def run_plain_towers(options: argparse.Namespace) -> int:
    """Print the folder to serve; return 1 if the checkpoint is of another kind."""
    try:
        source = Path(options.target)
        if not source.is_dir():
            source = Path(huggingface_hub.snapshot_download(options.target))
        name = options.target.strip("/").replace("/", "--")
        print(make_folder(source, Path(options.to) if options.to else CACHE / name))
    except (OSError, ValueError) as error:
        print(f"{options.target}: {error}", file=sys.stderr)
        return 1
    return 0


def make_folder(source: Path, folder: Path) -> Path:
    """Make the folder from a checkpoint's, or bring it up to date."""
    config = with_patterns(json.loads((source / "config.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is the checkpoint itself. Pass another folder with --to.")
    for file in sorted(source.iterdir()):
        link = folder / file.name
        if file.name == "config.json" or file.is_dir():
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def with_patterns(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that leaves out, by pattern, each tower of which it leaves out layers."""
    scheme = config.get("quantization_config") or {}
    if scheme.get("quant_method") != "compressed-tensors":
        raise ValueError(
            "its config.json has quantization method "
            f"{scheme.get('quant_method', 'none')}, not compressed-tensors. Serve it as it is."
        )
    ignored = scheme.get("ignore") or []
    found = [tower for tower in TOWERS if any(tower in name for name in ignored)]
    patterns = [f"re:.*{tower}.*" for tower in found if f"re:.*{tower}.*" not in ignored]
    return {**config, "quantization_config": {**scheme, "ignore": [*ignored, *patterns]}}
