"""What the README promises beside commands (tests/e2e/test_documents.py runs those)."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_lint_and_test() -> None:
    assert re.search(
        r"^make lint test test-slow test-browser test-kernels$",
        (ROOT / ".ci/run").read_text(),
        flags=re.MULTILINE,
    )


def test_every_folder_in_the_map_exists() -> None:
    tree = re.search(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert tree is not None
    for path in re.findall(r"^(\S+)", tree[1], flags=re.MULTILINE):
        assert (ROOT / path).exists(), path


def test_a_second_make_installs_nothing(tmp_path: Path) -> None:
    """With the stamp newer than what it depends on, no target asks pip for anything."""
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".installed").touch()
    plan = subprocess.run(
        ["make", "-n", f"VENV={venv}", "demo", "test", "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pytest" in plan
    assert "pip install" not in plan
