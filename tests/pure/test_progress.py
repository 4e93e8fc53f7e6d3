"""Progress bars of verbs called from Python: shown to people, where no callbacks are given."""

from typing import Any

import pytest

from sparrow import arguments
from sparrow.arguments import configured
from sparrow.progress import is_interactive
from sparrow.schema.common import PuzzleConfig
from sparrow.schema.types import Progress


@configured(PuzzleConfig)
def measure(config: PuzzleConfig, *, progress: Progress | None = None) -> bool:
    if progress is not None:
        progress(1, 2, "answers")
    return progress is not None


def test_a_bar_is_shown_to_people_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_interactive()
    assert not measure("graph")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(arguments, "is_interactive", lambda: True)
    assert measure("graph")
    assert "answers" in capsys.readouterr().err
    seen: list[Any] = []
    assert measure("graph", progress=lambda *call: seen.append(call))
    assert seen == [(1, 2, "answers")]
    assert capsys.readouterr().err == ""
