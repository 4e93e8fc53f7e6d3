"""Every kernel compiles for an H200 in bf16 and fits its shared memory, as far as a CPU can tell.

Other tests of this folder interpret kernels, which says nothing about compiling them. Here a
process of its own compiles the launches of tests/support/compile_sm90.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from support.flows import LIBRARY, ODD, ON_GPU

from sparrow.ops import kernels

GENERATED = "sparrow_flow_"
KEPT = "attend_kept._grad"
TESTS = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in Path(kernels.__path__[0]).glob("[!_]*.py"))
SHARED_MEMORY = 227 * 1024  # bytes of a program on Hopper
NAMES = """
import json
from support.compile_sm90 import kernel_modules, launched_by
names = [f"{m.__name__.rpartition('.')[2]}.{k}" for m in kernel_modules() for k in launched_by(m)]
print(json.dumps(names))
"""


def run(folder: Path, *arguments: str) -> list[Any]:
    """The lines of JSON that Python prints where kernels are not interpreted."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    clean |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("triton"), "-m", "support.compile_sm90")


def test_small_kernels_compile_and_fit(tmp_path: Path) -> None:
    """The quick tier's share of the sweep below."""
    found = run(tmp_path, "-m", "support.compile_sm90", "store", "rows")
    assert {kernel["name"].partition(".")[0] for kernel in found} == {"pages", "sampling"}
    check_resources(found)


@pytest.mark.slow
def test_every_kernel_and_flow_compiles_and_fits(
    compiled: list[dict[str, Any]], tmp_path: Path
) -> None:
    (names,) = run(tmp_path, "-c", NAMES)
    assert len(names) >= 10
    assert {name.partition(".")[0] for name in names} <= set(MODULES)
    made = {kernel["name"] for kernel in compiled}
    generated = {name for name in made if name.startswith(GENERATED)}
    assert set(names) == made - generated
    flows = len(LIBRARY) + len(ODD) + len(ON_GPU)
    for kernel in ("append", "score_pages"):
        assert sum(n.endswith(f".{kernel}") for n in generated) == flows  # -1 learned, +1 shape
    assert sum(name.endswith(".choose") for name in generated) >= 8
    check_resources(compiled)


def check_resources(compiled: list[dict[str, Any]]) -> None:
    """Nothing spills, but generated kernels may keep a word on the stack, and one kernel more: the
    fastest of bench/tune_kept.py.
    """
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        allowed = 16 * kernel["name"].startswith(GENERATED) + 128 * kernel["name"].startswith(KEPT)
        assert kernel["stack"] <= allowed, kernel
