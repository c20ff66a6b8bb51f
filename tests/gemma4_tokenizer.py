"""Gemma 4's own tokenizer and chat template, built from the vocabulary file of a package.

The files are too large to commit. The source package of `llama-cpp-python` (77 MB) has the
vocabulary of Gemma-4-26B-A4B-it: token strings, merges, special tokens and the chat template. The
result is kept in the user's cache folder. `GEMMA4_TOKENIZER=folder` uses another tokenizer.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llama-cpp-python"
REQUIREMENT = (
    f"{PACKAGE}==0.3.36 "
    "--hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
)
VOCABULARY = "models/ggml-vocab-gemma-4.gguf"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DOWNLOAD_TIMEOUT_S = 180

# GGUF: numbers by their type id, and the two types that need code
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# GGUF token types that are matched before any BPE merge
CONTROL, USER_DEFINED = 3, 4

ROLES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "soc_token": "<|channel>",
    "eoc_token": "<channel|>",
    "think_token": "<|think|>",
    "escape_token": '<|"|>',
    "stc_token": "<|tool_call>",
    "etc_token": "<tool_call|>",
    "std_token": "<|tool>",
    "etd_token": "<tool|>",
    "str_token": "<|tool_response>",
    "etr_token": "<tool_response|>",
}


class Unavailable(Exception):
    """The package could not be fetched."""


def gemma4_tokenizer() -> Path:
    """Return a folder with the tokenizer, built on first use; raise Unavailable if that fails."""
    given = os.environ.get("GEMMA4_TOKENIZER")
    folder = Path(given) if given else cache_folder()
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing and given:
        raise ValueError(f"GEMMA4_TOKENIZER={given} lacks {', '.join(missing)}.")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fields = read_gguf(download_vocabulary(Path(scratch)))
            write_tokenizer(fields, Path(scratch))
            # the last one completes the folder for concurrent runs
            for name in reversed(FILES):
                os.replace(Path(scratch) / name, folder / name)
    return folder


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_dflash" / "gemma4-tokenizer"


def download_vocabulary(folder: Path) -> bytes:
    """Fetch the source package with pip, which reads its metadata and compiles nothing."""
    wanted = folder / "requirements.txt"
    wanted.write_text(REQUIREMENT + "\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    command += ["--require-hashes", "-r", str(wanted), "-d", str(folder), "--quiet"]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{PACKAGE} was not downloaded in {DOWNLOAD_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{PACKAGE} could not be downloaded: {last}") from error
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            if member.name.endswith(VOCABULARY):
                file = files.extractfile(member)
                assert file is not None, member.name
                return file.read()
    raise Unavailable(f"{archive.name} has no {VOCABULARY}")


def read_gguf(data: bytes) -> dict[str, Any]:
    """Return the key-value fields of a GGUF file."""
    magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", data)
    assert (magic, version, num_tensors) == (b"GGUF", 3, 0), (magic, version, num_tensors)
    fields: dict[str, Any] = {}
    at = 24
    for _ in range(num_fields):
        key, at = _read_strings(data, at, 1)
        [kind] = struct.unpack_from("<I", data, at)
        fields[key[0]], at = _read_value(data, at + 4, kind)
    return fields


def _read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == ARRAY:
        kind, count = struct.unpack_from("<IQ", data, at)
        return _read_many(data, at + 12, kind, count)
    [value], at = _read_many(data, at, kind, 1)
    return value, at


def _read_many(data: bytes, at: int, kind: int, count: int) -> tuple[list[Any], int]:
    if kind == STRING:
        return _read_strings(data, at, count)
    layout = f"<{count}{NUMBERS[kind]}"
    return list(struct.unpack_from(layout, data, at)), at + struct.calcsize(layout)


def _read_strings(data: bytes, at: int, count: int) -> tuple[list[str], int]:
    strings = []
    for _ in range(count):
        start = at + 8
        at = start + int.from_bytes(data[at:start], "little")
        strings.append(data[start:at].decode())
    return strings, at


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write files for transformers: BPE over whole lines, spaces as U+2581, byte fallback."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": tokens[i], **flags, "special": True}
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        # no spaces are left at this point, so a text stays one piece
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        # <bos> comes from the chat template
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = {
        **ROLES,
        "add_bos_token": False,
        "extra_special_tokens": ["<|video|>"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
