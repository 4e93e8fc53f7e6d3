"""A short fault campaign; the whole one is in docs/results/faults.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "fault_campaign.py"


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ("files=60", "rewards=16")]
KILLS = pytest.param("kills=3", marks=pytest.mark.slow, id="kills")


@pytest.mark.parametrize("part", ["settings=40", *SLOW, KILLS])
def test_nothing_fails(part: str, tmp_path: Path) -> None:
    name, _, count = part.partition("=")
    out = tmp_path / "tries.json"
    words = [sys.executable, str(PROGRAM), f"--{name}", count, "--seed", "1", "--out", str(out)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert len(json.loads(out.read_text())["tries"]) == int(count)
