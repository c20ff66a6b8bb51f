"""A drafter's learned mask embedding: `mask_embedding.pt` beside its weights.

A dict that `torch.save` wrote, as SGLang reads it: `embedding` [H] takes the place of the target's
embedding of `mask_token_id`. With `per_position` there would be one for each row of a block, which
no server runs.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FILE = "mask_embedding.pt"

logger = logging.getLogger(__name__)


def find(drafter: str) -> Path:
    """Return the folder in which the file of a drafter would be. For a name on the Hub, from where
    SGLang fetches weights and configs only, fetch the file first, if there is one."""
    folder = Path(drafter)
    if folder.is_dir():
        return folder
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(drafter, FILE)).parent
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        # otherwise the Hub has answered that there is none
        if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, EntryNotFoundError):
            logger.info(
                "The Hub does not tell whether the drafter %s has a %s (%s). If it has, pass the "
                "folder of a copy with it: acceptance will be low without.",
                drafter,
                FILE,
                type(error).__name__,
            )
    return folder


def read(folder: str | Path, *, name: str, mask_token_id: int, hidden_size: int) -> Tensor | None:
    """Return the embedding [H] in a drafter's folder, None if there is none. Raise ValueError for a
    file that is not what this module describes."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"The {FILE} of the drafter {name} cannot be read ({first}). Download it again."
        ) from error
    if not isinstance(found, dict) or not {"embedding", "mask_token_id"} <= found.keys():
        held = f"the keys {sorted(map(str, found))}" if isinstance(found, dict) else "no dict"
        raise ValueError(
            f"The {FILE} of the drafter {name} has {held}, but sglang_dflash reads a dict of "
            "embedding and mask_token_id. Write it so if it holds one vector for the mask token."
        )
    if found["mask_token_id"] != mask_token_id:
        raise ValueError(
            f"The {FILE} of the drafter {name} is for token {found['mask_token_id']}, but its "
            f"config.json names the mask token {mask_token_id}. Correct "
            "dflash_config.mask_token_id."
        )
    embedding = found["embedding"]
    if found.get("per_position") or tuple(getattr(embedding, "shape", ())) != (hidden_size,):
        shape = list(getattr(embedding, "shape", ()))
        raise ValueError(
            f"The {FILE} of the drafter {name} holds an embedding of shape {shape}"
            f"{' by position' if found.get('per_position') else ''}, but sglang_dflash reads one "
            f"vector of {hidden_size} numbers. Use a drafter with one for all positions."
        )
    return embedding
