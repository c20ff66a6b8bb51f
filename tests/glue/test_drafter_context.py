"""A server's context, and the one that its drafter is made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.glue.test_server_args import changed_drafter, parse


def test_a_drafter_for_shorter_contexts_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = changed_drafter(models, tmp_path / "drafter", max_position_embeddings=512)
    told = r"made for contexts of up to 512 tokens.* take 2048\. Pass --context-length 512, or set"
    with pytest.raises(ValueError, match=told):
        parse(models, drafter=drafter)
    assert parse(models, "--context-length", "512", drafter=drafter).context_length == 512
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "true")
    parse(models, drafter=drafter)
