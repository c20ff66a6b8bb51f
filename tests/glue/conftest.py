from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_drafter, make_target


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random `llama` target and a `drafter` that fits it."""
    folder = tmp_path_factory.mktemp("models")
    make_target("llama", folder / "llama")
    make_drafter(folder / "drafter")
    return folder


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Attach to SGLang in this process as SGLang's loader would."""
    from sglang_dflash.glue.plugin import activate

    activate()
