"""The figures that a test's code saves, to look into beside the written file."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that every figure is added to when it is saved, after it is written."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **rest: Any) -> None:
        save(figure, *args, **rest)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures
