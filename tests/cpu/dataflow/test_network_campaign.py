"""A short version of bench/network_faults.py: kills and faults of a run over the network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEPS, KILLS, FAULTS = 10, 6, 40


@pytest.mark.slow
def test_no_prompt_is_lost_or_used_twice(tmp_path: Path) -> None:
    script = ROOT / "bench" / "network_faults.py"
    settings = {"kills": KILLS, "faults": FAULTS, "steps": STEPS, "pause": 5, "line": 0.05}
    words = [f"--{name}={value}" for name, value in {**settings, "warm": 25}.items()]
    found = subprocess.run(
        [sys.executable, str(script), f"--out={tmp_path / 'campaign'}", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    figures = json.loads(found.stdout[found.stdout.index("{\n") :])
    assert figures["lost_or_twice"] == []
    assert figures["steps"] == STEPS
    assert sum(figures["kills"].values()) >= KILLS // 2
    assert sum(figures["faults"].values()) >= FAULTS // 2
