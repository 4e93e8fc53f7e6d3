"""Functions named by text: imported, of a file, or registered in this process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparrow.functions import register, resolve

SOURCE = "from dataclasses import dataclass\nVALUE = 3\n\n\ndef score(text):\n    return VALUE\n"


def test_modules_and_files_are_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "functions_of_mine.py").write_text(SOURCE)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    monkeypatch.chdir(tmp_path)
    texts = ("functions_of_mine:score", "functions_of_mine.py:score")
    for text in (*texts, f"{tmp_path}/functions_of_mine.py:score"):
        assert resolve(text, "data.reward")("") == 3


def test_a_registered_function_belongs_to_its_setting() -> None:
    def score() -> int:
        return 1

    text = register(score, "data.reward")
    assert text.startswith("here:score@")
    assert resolve(text, "data.reward") is score
    assert resolve(register(lambda: 2, "data.reward"), "data.reward")() == 2
    with pytest.raises(ValueError, match=r"rollout\.episode"):
        resolve(text, "rollout.episode")


def test_the_name_of_a_registered_function_changes_with_its_source() -> None:
    """Of a function without source lines, and of a lambda, with its code."""

    def defined(source: str) -> Callable[..., Any]:
        space: dict[str, Any] = {}
        exec(source, space)
        return space["score"]

    def name(function: Callable[..., Any]) -> str:
        return register(function, "data.reward")

    one, two = (name(defined(f"def score(x):\n return x in {{'a', 'b'}} and {n}")) for n in "12")
    assert one != two
    assert resolve(one, "data.reward")("a") == 1
    assert resolve(two, "data.reward")("a") == 2
    assert name(defined("def score(x):\n return x in {'b', 'a'} and 1")) == one
    once = name(lambda text: 1.0)
    again = (name(lambda text: 1.0), "in a call of other arguments")[0]
    assert once == again != name(lambda text: 2.0)
    for function in (len, partial(len), Random(0).random, Path):
        assert resolve(name(function), "data.reward") is not None


def test_mistakes_name_the_setting_and_the_text(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "sound.py").write_text(SOURCE)
    for text in (
        "score",
        ":score",
        "math:",
        "math:two words",
        "no_such_module:f",
        "no_such_file.py:f",
        "math:no_such",
        "math:pi",
        f"{tmp_path}/broken.py:f",
        f"{tmp_path}/sound.py:VALUE",
    ):
        with pytest.raises(ValueError, match=r"algorithm\.advantage") as error:
            resolve(text, "algorithm.advantage")
        assert text in str(error.value)
