"""Numba's code on disk computes what the process that compiled it computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_kernels_from_disk_have_the_bits_of_those_just_compiled(tmp_path: Path) -> None:
    """Processes of one run differ in this: the first compiles, the others load."""
    own = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    digests = [
        subprocess.run(
            [sys.executable, "-m", "support.kernel_bits"],
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert any(tmp_path.rglob("*.nbi"))
    assert digests[0] == digests[1]
