"""The doctor without torch: packages against pyproject.toml, the machine's files, the verdict."""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow.bench.doctor import host, packages, probe
from sparrow.bench.doctor.packages import CORE, OPTIONAL, Found, Package, older
from sparrow.bench.doctor.verdict import verdict

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def wanted(requirements: list[str]) -> set[tuple[str, str]]:
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", each) for each in requirements]
    return {(each[1], each[2]) for each in found if each is not None}


def test_the_table_is_that_of_pyproject() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION
    assert {(each.name, each.minimum) for each in CORE} == wanted(PROJECT["dependencies"])
    extras = {name: own for name, own in PROJECT["optional-dependencies"].items() if name != "dev"}
    assert {each.extra for each in OPTIONAL} == set(extras)
    for name, requirements in extras.items():
        own = {(each.name, each.minimum) for each in OPTIONAL if each.extra == name}
        assert own == wanted(requirements)


@pytest.mark.parametrize(
    ("version", "minimum", "is_older"),
    [
        ("2.13.0+cpu", "2.11", False),
        ("2.11", "2.11.0", False),
        ("2.9.1", "2.11", True),
        ("10.0", "9.9", False),
        ("0.1.24", "0.1.25", True),
        ("0", "13", True),
        ("unknown", "1.0", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, minimum: str, is_older: bool) -> None:
    assert older(version, minimum) is is_older


def test_how_to_get_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "pip", lambda: "pip")
    core, math = CORE[0], next(each for each in OPTIONAL if each.extra == "math")
    monkeypatch.setattr(packages, "installed", lambda name: "0.1.0")
    assert Found(package=core, version=None).install == "pip install 'torch>=2.11'"
    assert Found(package=math, version=None).install == "pip install 'sparrow-rl[math]'"
    assert Found(package=math, version="0.1").install == "pip install 'math-verify>=0.8'"
    monkeypatch.setattr(packages, "installed", lambda name: None)  # a checkout, not installed
    assert Found(package=math, version=None).install == "pip install 'math-verify>=0.8'"


def test_the_browser_comes_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Python that runs this, where its environment is not active."""
    monkeypatch.setattr(packages, "installed", lambda name: None)
    browser = next(each for each in OPTIONAL if each.extra == packages.BROWSER)
    monkeypatch.setenv("PATH", str(tmp_path))
    said, python = Found(package=browser, version=None).install, sys.executable
    install, after = said.split(" && ")
    assert install == f"{python} -m pip install 'playwright>=1.50'"
    assert after == f"{python} -m playwright install chromium"
    monkeypatch.setattr("shutil.which", lambda name: str(Path(python).parent / name))
    assert Found(package=browser, version=None).install == (
        "pip install 'playwright>=1.50' && playwright install chromium"
    )


def test_packages_that_are_there_and_not() -> None:
    assert packages.installed("pytest") is not None
    assert packages.installed("no-such-package-anywhere") is None
    gone = Package(name="no-such-package-anywhere", minimum="1", purpose="nothing")
    assert Found(package=gone, version=None).state == "missing"
    assert Found(package=gone, version="0.9").state == "old"
    assert Found(package=gone, version="1.0.1").state == "ok"


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


def test_memory_of_older_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  800 kB\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("500000")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("100000")
    assert host.memory(tmp_path, tmp_path) == {"total": 500_000, "available": 400_000}
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712")  # no limit
    assert host.memory(tmp_path, tmp_path) == {"total": 1_024_000, "available": 819_200}


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


def test_disk_of_a_folder_to_come(tmp_path: Path) -> None:
    found = host.disk("runs", tmp_path / "a" / "b")
    assert found["folder"] == str(tmp_path / "a" / "b")
    assert 0 < found["free"] <= found["total"]
    assert found["writable"] == os.access(tmp_path, os.W_OK)


def test_last_words() -> None:
    assert probe.last_words("Traceback\n  line\nOSError: no lib\n\n", 1) == "OSError: no lib"
    assert probe.last_words("", -11) == "the process was killed by SIGSEGV"
    assert probe.last_words("", 3) == "the process ended with exit code 3"


def package(name: str = "torch", **changes: Any) -> dict[str, Any]:
    plain = {
        "name": name,
        "version": "9",
        "minimum": "2",
        "state": "ok",
        "extra": None,
        "purpose": "tensors",
        "used": True,
        "install": f"pip install {name}",
    }
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packages": [package("numba", version=None, state="missing")]}, "numba is not installed"),
        ({"packages": [package(version="1", state="old")]}, "torch 1 is older than 2"),
        (
            {"broken": {"stage": "torch", "why": "OSError: no lib"}, "torch": None, "gpus": None},
            "torch does not load: OSError: no lib",
        ),
        ({"self_test": {"passed": False}}, "the self-test failed"),
        ({"kernels": [kernel("cpu", passed=False, error=2.0)]}, "on the CPU is wrong by 2"),
        ({"broken": {"stage": "kernels", "why": "x"}, "kernels": None}, "the kernels broke: x"),
        (
            {"models": {"shipped": [{"name": "tiny", "folder": "/t", "whole": False}]}},
            "the shipped model tiny lacks files",
        ),
    ],
)
def test_what_keeps_the_core_from_working(changes: dict[str, Any], said: str) -> None:
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


def test_a_gpu_that_breaks_leaves_the_cpu() -> None:
    broken = {"stage": "kernels", "why": "RuntimeError: Failed to find C compiler"}
    found = verdict(examined(gpus=[gpu()], kernels=None, broken=broken), check=True)
    assert found["ready"]
    assert found["devices"] == ["cpu"]
    assert "C compiler" in found["missing"][0]["what"]


def test_gpus_of_no_use_are_told() -> None:
    built = verdict(examined(driver="550.1"), check=True)["missing"]
    assert "built for a CPU" in built[0]["what"]
    torch = {"version": "9", "build": "CUDA 12.8", "threads": 2, "no_gpu": "driver too old"}
    assert (
        "driver too old"
        in verdict(examined(driver="4", torch=torch), check=True)["missing"][0]["what"]
    )
    old = verdict(examined(gpus=[gpu(kernels=False, capability="7.5")]), check=True)
    assert "7.5" in old["missing"][0]["what"]
