"""The doctor without torch: packages against pyproject.toml, the machine's files, the verdict."""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow.bench.doctor import host, probe
from sparrow.bench.doctor.examination import verdict
from sparrow.bench.doctor.host import CORE, OPTIONAL, Package, older, package_state

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def wanted(requirements: list[str]) -> set[tuple[str, str]]:
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", each) for each in requirements]
    return {(each[1], each[2]) for each in found if each is not None}


def test_the_table_is_that_of_pyproject() -> None:
    assert PROJECT["name"] == host.DISTRIBUTION
    assert {(each.name, each.minimum) for each in CORE} == wanted(PROJECT["dependencies"])
    extras = {name: own for name, own in PROJECT["optional-dependencies"].items() if name != "dev"}
    assert {each.extra for each in OPTIONAL} == set(extras)
    for name, requirements in extras.items():
        own = {(each.name, each.minimum) for each in OPTIONAL if each.extra == name}
        assert own == wanted(requirements)


def test_versions_are_compared_by_their_numbers() -> None:
    for version, minimum in (("2.13.0+cpu", "2.11"), ("2.11", "2.11.0"), ("10.0", "9.9")):
        assert not older(version, minimum)
    for version, minimum in (("2.9.1", "2.11"), ("0.1.24", "0.1.25"), ("0", "13"), ("x", "1.0")):
        assert older(version, minimum)
    gone = Package("no-such-package-anywhere", "1", "nothing")
    states = {None: "missing", "0.9": "old", "1.0.1": "ok"}
    assert {seen: package_state(gone, seen)["state"] for seen in states} == states
    assert host.installed("pytest") is not None
    assert host.installed(gone.name) is None


def test_how_to_get_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Python that runs this, where its environment is not active."""

    def install(package: Package, version: str | None = None) -> str:
        return package_state(package, version)["install"]

    python = sys.executable
    math, browser = (next(p for p in OPTIONAL if p.extra == x) for x in ("math", host.BROWSER))
    monkeypatch.setattr("shutil.which", lambda name: str(Path(python).parent / name))
    monkeypatch.setattr(host, "installed", lambda name: "0.1.0")
    assert install(CORE[0]) == "pip install 'torch>=2.11'"
    assert install(math) == "pip install 'sparrow-rl[math]'"
    assert install(math, "0.1") == "pip install 'math-verify>=0.8'"
    monkeypatch.setattr(host, "installed", lambda name: None)  # a checkout, not installed
    assert install(math) == "pip install 'math-verify>=0.8'"
    after = "playwright install chromium"
    assert install(browser) == f"pip install 'playwright>=1.50' && {after}"
    monkeypatch.setattr("shutil.which", lambda name: None)
    wanted = f"{python} -m pip install 'playwright>=1.50' && {python} -m {after}"
    assert install(browser) == wanted


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 kB\n")
    assert host.memory(proc, group) == {"total": 1_024_000, "available": 819_200}
    (group / "memory.max").write_text("max\n")
    assert host.memory(proc, group) == {"total": 1_024_000, "available": 819_200}
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 100000\ninactive_file 150000\n")
    assert host.memory(proc, group) == {"total": 500_000, "available": 350_000}
    old = tmp_path / "old" / "memory"  # as older containers have it
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500000")
    (old / "memory.usage_in_bytes").write_text("100000")
    assert host.memory(proc, old.parent) == {"total": 500_000, "available": 400_000}
    (old / "memory.limit_in_bytes").write_text("9223372036854771712")  # no limit
    assert host.memory(proc, old.parent) == {"total": 1_024_000, "available": 819_200}


def test_cores_of_a_container(tmp_path: Path) -> None:
    assert host.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert host.cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000")
    assert host.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert host.cpu_quota(tmp_path) == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.cpu_quota(tmp_path) is None


def test_instructions_for_bf16(tmp_path: Path) -> None:
    assert host.bf16_instructions(tmp_path) is None
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16 sse\n")
    assert host.bf16_instructions(tmp_path) == ["amx_bf16", "avx512_bf16"]
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd\n")
    assert host.bf16_instructions(tmp_path) == []


def test_the_driver_by_either_module(tmp_path: Path) -> None:
    assert host.driver(tmp_path) is None
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    file = tmp_path / "driver/nvidia/version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12.2"
    )
    assert host.driver(tmp_path) == "550.54.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n")
    assert host.driver(tmp_path) == "570.86.10"


def test_disk_of_a_folder_to_come_and_last_words(tmp_path: Path) -> None:
    found = host.disk("runs", tmp_path / "a" / "b")
    assert found["folder"] == str(tmp_path / "a" / "b")
    assert 0 < found["free"] <= found["total"]
    assert found["writable"] == os.access(tmp_path, os.W_OK)
    assert probe.last_words("Traceback\n  line\nOSError: no lib\n\n", 1) == "OSError: no lib"
    assert probe.last_words("", -11) == "the process was killed by SIGSEGV"
    assert probe.last_words("", 3) == "the process ended with exit code 3"


def package(name: str = "torch", **changes: Any) -> dict[str, Any]:
    plain = {"name": name, "version": "9", "minimum": "2", "state": "ok", "extra": None}
    plain |= {"purpose": "tensors", "used": True, "install": f"pip install {name}"}
    return plain | changes


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
        "disk": [{"what": "runs", "folder": "/r", "writable": True}],
        "fits": [],
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
    assert {"generate", "calibrate", "plan", "train"} <= set(found["ready_for"])
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
        assert found["ready_for"] == found["devices"] == []
        (problem,) = found["problems"]
        assert said in problem["what"]
        assert problem["how"]


def test_what_could_be_added() -> None:
    more = [
        package("math-verify", extra="math", version=None, state="missing", purpose="judging"),
        package("ray", extra="ray", version=None, state="missing", used=False),
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
    broken = here | {"kernels": None, "broken": {"stage": "kernels", "why": "no C compiler"}}
    found = verdict(broken, check=True)
    assert (found["ready"], found["devices"]) == (True, ["cpu"])
    assert "C compiler" in found["missing"][0]["what"]


def test_gpus_of_no_use_are_told() -> None:
    torch = {"version": "9", "build": "CUDA 12.8", "threads": 2, "no_gpu": "driver too old"}
    cases: dict[str, dict[str, Any]] = {
        "built for a CPU": {"driver": "550.1"},
        "driver too old": {"driver": "4", "torch": torch},
        "7.5": {"gpus": [gpu(kernels=False, capability="7.5")]},
    }
    for said, changes in cases.items():
        assert said in verdict(examined(**changes), check=True)["missing"][0]["what"]
