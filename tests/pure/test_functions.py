"""Functions named by text: imported, of a file, or registered in this process."""

from pathlib import Path

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
    assert text == "here:score"
    assert resolve(text, "data.reward") is score
    assert resolve(register(lambda: 2, "data.reward"), "data.reward")() == 2
    with pytest.raises(ValueError, match=r"rollout\.episode"):
        resolve(text, "rollout.episode")


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
