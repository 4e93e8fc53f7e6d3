"""The wheel in an empty environment, without the clone, does what README shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import MARKS, ROOT, inputs, steps

README = (ROOT / "README.md").read_text(encoding="utf-8")
ALONE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
PACKAGE = ("sparrow", "recipes", "pyproject.toml", "README.md", "LICENSE")


def run(*words: str | Path, folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=ALONE | (environment or {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it depends on, nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in PACKAGE:  # building beside the clone leaves no files in it
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = ("-m", "pip", "--quiet", "--no-input")
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", place, source, folder=place)
    (wheel,) = place.glob("*.whl")
    run(sys.executable, "-m", "venv", place / "environment", folder=place)
    python = place / "environment/bin/python"
    install = (python, *pip, "install", "-c", ROOT / "constraints.txt")
    run(*install, "torch==2.13.0", "numpy", folder=place)  # first, so that nothing takes another
    run(*install, wheel, folder=place)
    return python.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_readme_works_with_the_installed_wheel(programs: Path, tmp_path: Path) -> None:
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SPARROW_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    where = "import sparrow, sparrow_recipes; print(sparrow.__file__, sparrow_recipes.__file__)"
    told = run(programs / "python", "-c", where, folder=tmp_path, environment=environment)
    assert str(ROOT) not in told
    scripts = 0
    for step in steps(README):
        if step.kind == "python":
            (tmp_path / "script.py").write_text(step.text, encoding="utf-8")
            run(programs / "python", "script.py", folder=tmp_path, environment=environment)
            scripts += 1
        elif step.kind == "sh" and step.text.startswith("sparrow"):
            missing = [path for path in inputs(step.text) if not (tmp_path / path).exists()]
            if not (missing or {*step.marks} & {*MARKS}):
                run("bash", "-ec", step.text, folder=tmp_path, environment=environment)
    assert scripts
    for verb in re.findall(r"sparrow (\w+(?: decode| trace| score)?)", README):
        if re.search(rf"`sparrow {verb}|^sparrow {verb}", README, flags=re.MULTILINE):
            run("sparrow", *verb.split(), "--help", folder=tmp_path, environment=environment)
    run("sparrow", "train", "tiny", "--dry-run", folder=tmp_path, environment=environment)
