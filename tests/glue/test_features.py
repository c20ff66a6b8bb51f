"""Which targets a drafter can serve: determined through SGLang, from a config alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.glue import compat
from sglang_dflash.glue.startup.server_args import describe_target
from tests.tiny_models import HYBRIDS, write_hybrid_config


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_target_with_recurrent_layers_is_refused(tmp_path: Path, model_type: str) -> None:
    """Nothing rolls its state back to the last accepted token, so its text would be wrong."""
    folder = write_hybrid_config(tmp_path / model_type, model_type)
    config = compat.get_config(str(folder), trust_remote_code=False)
    architecture = HYBRIDS[model_type]["architectures"][0]
    with pytest.raises(ValueError, match=rf"\({architecture}\) has linear-attention or Mamba"):
        describe_target(config, name=str(folder))


def test_a_target_without_recurrent_layers_passes(models: Path) -> None:
    config = compat.get_config(str(models / "llama"), trust_remote_code=False)
    assert describe_target(config, name="llama").delivers_features
