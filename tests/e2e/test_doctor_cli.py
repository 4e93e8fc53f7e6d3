"""`sparrow doctor` as a user meets it, on a sound installation and on broken ones."""

import json
import os
from pathlib import Path

from support import cli
from support.waiting import ended, start

from sparrow.schema.base import from_dict
from sparrow.schema.doctor import Examination

ROOT = Path(__file__).parents[2]
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"


def run(*words: str, first: Path | None = None, folder: Path = ROOT) -> tuple[int, str]:
    """The verb, with modules of a folder before all others; its exit code, and what it said."""
    path = os.pathsep.join(map(str, filter(None, [first, ROOT])))
    own = {"COLUMNS": "80", "PYTHONPATH": path}
    return ended(start(folder, "-m", "sparrow", "doctor", *words, **own))


def broken(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    return folder


def test_a_sound_installation_is_ready(tmp_path: Path) -> None:
    code, shown = run(folder=tmp_path)
    assert code == 0, shown
    said = " ".join(shown.split())
    assert "torch" in said
    assert "self-test: passed yes" in said
    assert "fits: device cpu" in said
    assert "ready on cpu" in said
    assert max(map(len, shown.splitlines())) <= 80
    assert not list(tmp_path.iterdir()), "it looks and writes nothing"


def test_json_is_a_result_of_the_schema() -> None:
    done = cli.passed("doctor", "--no-check", "--json")
    found = from_dict(Examination, json.loads(done.stdout))
    assert (found.format, found.ready, found.devices[0]) == (1, True, "cpu")
    assert found.self_test is found.kernels is found.broken is None
    assert found.torch.threads >= 1
    assert {model.name for model in found.models.shipped} == {"small", "small-rl", "tiny"}
    assert min(found.models.memory, found.models.cache.free, found.models.runs.free) > 0
    assert (found.fits[0].device, found.fits[0].bytes) == ("cpu", found.models.memory)
    assert {each.name for each in found.packages} >= {"torch", "numba", "math-verify"}


def test_a_broken_torch_is_a_line(tmp_path: Path) -> None:
    for number, (text, said) in enumerate(
        (
            ("raise OSError('libcudart.so.12: no such file')", "libcudart.so.12: no such file"),
            (CRASH, "killed by SIGABRT"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        code, shown = run(first=broken(tmp_path / str(number), "torch", text))
        assert code == 1
        assert "Traceback" not in shown
        shown = " ".join(shown.split())
        for part in (said, "not ready", "--force-reinstall torch"):
            assert part in shown


def test_a_broken_numba_is_a_line_and_the_rest_is_told(tmp_path: Path) -> None:
    place = broken(tmp_path, "numba", "raise RuntimeError('numba needs another numpy')")
    code, said = run("--json", first=place)
    assert code == 1
    found = json.loads(said)
    assert "numba needs another numpy" in found["broken"]["why"]
    assert found["torch"]["threads"] >= 1
    assert "numba needs another numpy" in found["problems"][0]["what"]


def test_a_package_that_is_too_old_is_named(tmp_path: Path) -> None:
    old = tmp_path / "torch-2.5.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    code, said = run("--no-check", first=tmp_path)
    assert code == 1
    shown = " ".join(said.split())
    assert "torch 2.5.1 is older than 2.11" in shown
    assert "install 'torch>=2.11'" in shown
