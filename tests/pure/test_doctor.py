"""The doctor without torch: packages against pyproject.toml, the machine's files, the verdict."""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow.benchmarks import doctor
from sparrow.benchmarks.doctor import CORE, OPTIONAL, Package, failure, package_state, verdict
from sparrow.schema import doctor as schema

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def minimum_versions(requirements: list[str]) -> set[tuple[str, str]]:
    matches = [re.fullmatch(r"([\w-]+)>=([\d.]+)", entry) for entry in requirements]
    return {(match[1], match[2]) for match in matches if match is not None}


def test_the_table_is_that_of_pyproject() -> None:
    assert {(entry.name, entry.minimum) for entry in CORE} == minimum_versions(
        PROJECT["dependencies"]
    )
    unused = {"dev", "notebook"}  # that no verb needs
    optional = PROJECT["optional-dependencies"].items()
    extras = {name: packages for name, packages in optional if name not in unused}
    assert {entry.extra for entry in OPTIONAL} == set(extras)
    for name, requirements in extras.items():
        packages = {(entry.name, entry.minimum) for entry in OPTIONAL if entry.extra == name}
        assert packages == minimum_versions(requirements)


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
        assert package_state(Package("p", minimum, "nothing"), version).state == state
    assert doctor.installed("pytest") is not None
    assert doctor.installed("no-such-package-anywhere") is None


def test_how_to_get_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Python that runs this, where its environment is not active."""

    def install(package: Package, version: str | None = None) -> str:
        return package_state(package, version).install

    python = sys.executable
    math, browser = (next(p for p in OPTIONAL if p.extra == x) for x in ("math", doctor.BROWSER))
    monkeypatch.setattr("shutil.which", lambda name: str(Path(python).parent / name))
    assert install(CORE[0]) == "pip install 'torch>=2.11'"
    assert install(math) == "pip install 'math-verify>=0.8'"
    after = "playwright install chromium"
    assert install(browser) == f"pip install 'playwright>=1.50' && {after}"
    monkeypatch.setattr("shutil.which", lambda name: None)
    command = f"{python} -m pip install 'playwright>=1.50' && {python} -m {after}"
    assert install(browser) == command


def test_failure_the_driver_and_the_disk(tmp_path: Path) -> None:
    assert doctor.driver(tmp_path) is None
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    for text, version in (
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12.2", "550.54.15"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n", "570.86.10"),
    ):
        (tmp_path / "driver/nvidia/version").write_text(f"NVRM version: {text}")
        assert doctor.driver(tmp_path) == version
    later = doctor.disk(tmp_path / "a" / "b")  # a folder to come
    assert (later.folder, later.writable) == (
        str(tmp_path / "a" / "b"),
        os.access(tmp_path, os.W_OK),
    )
    assert later.free > 0
    assert failure("Traceback\n  line\nOSError: no lib\n\n", 1) == "OSError: no lib"
    assert failure("", -11) == "the process was killed by SIGSEGV"
    assert failure("", 3) == "the process exited with code 3"


def package(name: str = "torch", **changes: Any) -> schema.PackageState:
    changes = {"install": f"pip install {name}"} | changes
    return package_state(Package(name, "2", "tensors"), "9").replace(**changes)


def gpu(**changes: Any) -> schema.Gpu:
    sizes = {"total": 80, "free": 70}
    fields = {"index": 0, "name": "H", "capability": "9.0", "kernels": True} | sizes | changes
    return schema.Gpu(**fields)


def kernel(device: str, **changes: Any) -> schema.KernelTest:
    return schema.KernelTest(
        device=device, **{"version": "ours", "error": 1e-6, "passed": True} | changes
    )


def model(name: str, **changes: Any) -> schema.ModelState:
    return schema.ModelState(name=name, **{"folder": "/t", "whole": True, "bytes": 1} | changes)


TORCH = schema.TorchBuild(version="9", build="CPU", threads=2, no_gpu="torch sees none")
DISK = schema.Disk(folder="/d", free=2**40, writable=True)
MODELS = schema.ModelStates(
    shipped=(model("tiny"),), fetched=(), cache=DISK, runs=DISK, memory=2**34
)
PYTHON = {"sparrow": "1", "python": "3.11", "platform": "Linux", "executable": sys.executable}
PARTS = {"cores": 2, "driver": None, "torch": TORCH, "gpus": (), "models": MODELS}
TESTED = {"self_test": schema.SelfTest(passed=True, tokens=24, seconds=1.0)}
TESTED |= {"kernels": (kernel("cpu"),), "packages": (package(),)}
WELL = schema.Examination(**PYTHON, **PARTS, **TESTED)


def judged(**changes: Any) -> schema.Examination:
    """The verdict on a machine that differs from one with a CPU on which all is well."""
    return verdict(WELL.replace(**changes), check=True)


def test_all_is_well_on_a_cpu_and_a_saved_examination_is_the_same(tmp_path: Path) -> None:
    examined = judged()
    assert (examined.ready, examined.devices) == (True, ("cpu",))
    assert examined.problems == examined.missing == ()
    examined.save(tmp_path / "doctor.json")
    assert schema.Examination.load(tmp_path / "doctor.json") == examined


def test_what_keeps_the_core_from_working() -> None:
    cases: dict[str, dict[str, Any]] = {
        "numba": {"packages": [package("numba", version=None, state="missing")]},
        "torch 1": {"packages": [package(version="1", state="old")]},
        "no lib": {
            "broken": schema.Broken(stage="torch", why="no lib"),
            "torch": None,
            "gpus": None,
        },
        "self-test": {"self_test": schema.SelfTest(passed=False, tokens=24, seconds=1.0)},
        "wrong by 2": {"kernels": [kernel("cpu", passed=False, error=2.0)]},
        "crashed: x": {"broken": schema.Broken(stage="kernels", why="x"), "kernels": None},
        "tiny": {"models": MODELS.replace(shipped=[model("tiny", whole=False)])},
    }
    for text, changes in cases.items():
        examined = judged(**changes)
        assert (examined.ready, examined.devices) == (False, ())
        (problem,) = examined.problems
        assert text in problem.what
        assert problem.how


def test_what_could_be_added() -> None:
    more = [
        package("math-verify", extra="math", version=None, state="missing", purpose="judging"),
        package("triton", extra="kernels", version=None, state="missing"),
    ]
    models = MODELS.replace(
        fetched=[model("smollm2-135m", folder=None, whole=False)],
        runs=DISK.replace(writable=False),
    )
    examined = judged(packages=[package(), *more], models=models)
    assert examined.ready
    assert [(entry.what, entry.how) for entry in examined.missing] == [
        ("judging: math-verify is not installed", "pip install math-verify"),
        ("smollm2-135m, a real model: not fetched", "sparrow fetch smollm2-135m"),
        ("runs cannot be written to /d", "work in another folder"),
    ]


def test_gpus_count_when_their_kernels_were_right() -> None:
    both = [gpu(), gpu(index=1)]
    examined = judged(
        gpus=both, kernels=[kernel("cpu"), kernel("cuda:0"), kernel("cuda:1", passed=False)]
    )
    assert examined.devices == ("cpu", "cuda:0")
    assert "cuda:1" in examined.missing[0].what
    unchecked = verdict(WELL.replace(gpus=both, kernels=None), check=False)
    assert unchecked.devices == ("cpu", "cuda:0", "cuda:1")
    slow = judged(gpus=both, kernels=[kernel("cpu"), kernel("cuda:0", version="definition")])
    assert slow.devices == ("cpu",)


def test_gpus_of_no_use_are_told_and_leave_the_cpu() -> None:
    broken = schema.Broken(stage="kernels", why="RuntimeError: Failed to find C compiler")
    cases: dict[str, dict[str, Any]] = {
        "built for a CPU": {"driver": "550.1"},
        "too old": {"driver": "4", "torch": TORCH.replace(build="CUDA 12.8", no_gpu="too old")},
        "7.5": {"gpus": [gpu(kernels=False, capability="7.5")]},
        "C compiler": {"gpus": [gpu()], "kernels": None, "broken": broken},
    }
    for text, changes in cases.items():
        examined = judged(**changes)
        assert text in examined.missing[0].what
        assert (examined.ready, examined.devices) == (True, ("cpu",))
