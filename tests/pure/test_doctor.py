"""The doctor without torch: packages against pyproject.toml, the machine's files, the verdict."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow.bench import doctor
from sparrow.bench.doctor import CORE, OPTIONAL, Package, last_words, package_state, verdict

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def wanted(requirements: list[str]) -> set[tuple[str, str]]:
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", each) for each in requirements]
    return {(each[1], each[2]) for each in found if each is not None}


def test_the_table_is_that_of_pyproject() -> None:
    assert {(each.name, each.minimum) for each in CORE} == wanted(PROJECT["dependencies"])
    unused = {"dev", "serve", "ray"}  # that no verb needs
    given = PROJECT["optional-dependencies"].items()
    extras = {name: own for name, own in given if name not in unused}
    assert {each.extra for each in OPTIONAL} == set(extras)
    for name, requirements in extras.items():
        own = {(each.name, each.minimum) for each in OPTIONAL if each.extra == name}
        assert own == wanted(requirements)


def test_versions_are_compared_by_their_numbers() -> None:
    for version, minimum, state in (
        ("2.13.0+cpu", "2.11", "ok"),
        ("2.11", "2.11.0", "ok"),
        ("10.0", "9.9", "ok"),
        ("2.9.1", "2.11", "old"),
        ("0.1.24", "0.1.25", "old"),
        ("x", "1.0", "old"),
        (None, "1", "missing"),
    ):
        assert package_state(Package("p", minimum, "nothing"), version)["state"] == state
    assert doctor.installed("pytest") is not None
    assert doctor.installed("no-such-package-anywhere") is None


def test_how_to_get_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Python that runs this, where its environment is not active."""

    def install(package: Package, version: str | None = None) -> str:
        return package_state(package, version)["install"]

    python = sys.executable
    math, browser = (next(p for p in OPTIONAL if p.extra == x) for x in ("math", doctor.BROWSER))
    monkeypatch.setattr("shutil.which", lambda name: str(Path(python).parent / name))
    assert install(CORE[0]) == "pip install 'torch>=2.11'"
    assert install(math) == "pip install 'math-verify>=0.8'"
    after = "playwright install chromium"
    assert install(browser) == f"pip install 'playwright>=1.50' && {after}"
    monkeypatch.setattr("shutil.which", lambda name: None)
    wanted = f"{python} -m pip install 'playwright>=1.50' && {python} -m {after}"
    assert install(browser) == wanted


def test_last_words_and_the_driver(tmp_path: Path) -> None:
    assert doctor.driver(tmp_path) is None
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    for text, version in (
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12.2", "550.54.15"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n", "570.86.10"),
    ):
        (tmp_path / "driver/nvidia/version").write_text(f"NVRM version: {text}")
        assert doctor.driver(tmp_path) == version
    assert last_words("Traceback\n  line\nOSError: no lib\n\n", 1) == "OSError: no lib"
    assert last_words("", -11) == "the process was killed by SIGSEGV"
    assert last_words("", 3) == "the process ended with exit code 3"


def package(name: str = "torch", **changes: Any) -> dict[str, Any]:
    plain = Package(name, "2", "tensors")
    return package_state(plain, "9") | {"install": f"pip install {name}"} | changes


def gpu(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "name": "H", "capability": "9.0", "kernels": True} | changes


def examined(**changes: Any) -> dict[str, Any]:
    """A machine with a CPU on which all is well."""
    well = {
        "packages": [package()],
        "torch": {"version": "9", "build": "CPU", "threads": 2, "no_gpu": "torch sees none"},
        "driver": None,
        "gpus": [],
        "models": {"shipped": [{"name": "tiny", "folder": "/t", "whole": True}], "fetched": []},
        "self_test": {"passed": True, "tokens": 24, "seconds": 1.0},
        "kernels": [kernel("cpu")],
        "broken": None,
    }
    return well | changes


def kernel(device: str, **changes: Any) -> dict[str, Any]:
    return {"device": device, "version": "ours", "error": 1e-6, "passed": True} | changes


def test_all_is_well_on_a_cpu() -> None:
    found = verdict(examined(), check=True)
    assert found["ready"]
    assert found["devices"] == ["cpu"]
    assert found["problems"] == found["missing"] == []


def test_what_keeps_the_core_from_working() -> None:
    cases: dict[str, dict[str, Any]] = {
        "numba": {"packages": [package("numba", version=None, state="missing")]},
        "torch 1": {"packages": [package(version="1", state="old")]},
        "no lib": {"broken": {"stage": "torch", "why": "no lib"}, "torch": None, "gpus": None},
        "self-test": {"self_test": {"passed": False}},
        "wrong by 2": {"kernels": [kernel("cpu", passed=False, error=2.0)]},
        "broke: x": {"broken": {"stage": "kernels", "why": "x"}, "kernels": None},
        "tiny": {"models": {"shipped": [{"name": "tiny", "folder": "/t", "whole": False}]}},
    }
    for said, changes in cases.items():
        found = verdict(examined(**changes), check=True)
        assert not found["ready"]
        assert found["devices"] == []
        (problem,) = found["problems"]
        assert said in problem["what"]
        assert problem["how"]


def test_what_could_be_added() -> None:
    more = [
        package("math-verify", extra="math", version=None, state="missing", purpose="judging"),
        package("triton", extra="kernels", version=None, state="missing"),
    ]
    models = {"shipped": [], "fetched": [{"name": "smollm2-135m", "folder": None, "whole": False}]}
    found = verdict(examined(packages=[package(), *more], models=models), check=True)
    assert found["ready"]
    assert found["missing"] == [
        {"what": "judging: math-verify is not installed", "how": "pip install math-verify"},
        {"what": "smollm2-135m, a real model: not fetched", "how": "sparrow fetch smollm2-135m"},
    ]


def test_gpus_count_when_their_kernels_were_right() -> None:
    here = examined(gpus=[gpu(), gpu(index=1)])
    checked = here | {"kernels": [kernel("cpu"), kernel("cuda:0"), kernel("cuda:1", passed=False)]}
    found = verdict(checked, check=True)
    assert found["devices"] == ["cpu", "cuda:0"]
    assert "cuda:1 is wrong" in found["missing"][0]["what"]
    assert verdict(here | {"kernels": None}, check=False)["devices"] == ["cpu", "cuda:0", "cuda:1"]
    slow = here | {"kernels": [kernel("cpu"), kernel("cuda:0", version="definition")]}
    assert verdict(slow, check=True)["devices"] == ["cpu"]


def test_gpus_of_no_use_are_told_and_leave_the_cpu() -> None:
    broken = {"stage": "kernels", "why": "RuntimeError: Failed to find C compiler"}
    torch = {"version": "9", "build": "CUDA 12.8", "threads": 2, "no_gpu": "driver too old"}
    cases: dict[str, dict[str, Any]] = {
        "built for a CPU": {"driver": "550.1"},
        "driver too old": {"driver": "4", "torch": torch},
        "7.5": {"gpus": [gpu(kernels=False, capability="7.5")]},
        "C compiler": {"gpus": [gpu()], "kernels": None, "broken": broken},
    }
    for said, changes in cases.items():
        found = verdict(examined(**changes), check=True)
        assert said in found["missing"][0]["what"]
        assert (found["ready"], found["devices"]) == (True, ["cpu"])
