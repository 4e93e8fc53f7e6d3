"""The README promises commands: each `make` target and each `sparrow` verb must exist."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))


def code() -> str:
    """Shell blocks, and code inside sentences."""
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    shell = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return "\n".join([*shell, *re.findall(r"`[^`\n]+`", prose)])


def test_every_make_target_of_the_readme_exists() -> None:
    promised = set(re.findall(r"\bmake ([a-z][a-z-]*)", code()))
    assert {"demo", "test"} <= promised
    assert promised <= targets()


def test_ci_runs_lint_and_test() -> None:
    assert re.search(
        r"^make lint test test-browser test-kernels$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE
    )


def test_every_verb_of_the_readme_exists() -> None:
    from typer.main import get_group

    from sparrow.cli import app

    promised = set(re.findall(r"\bsparrow ([a-z][a-z-]*)", code()))
    assert {"generate", "fetch"} <= promised
    assert promised <= get_group(app).commands.keys()


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
