"""The file of measurements: nothing lost, nothing mixed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sparrow.calibrate.trajectories import FILE, Measured, Trajectories

ABOUT = {"model": "ab", "temperature": 1.0}


def measured(prompt: int = 0, sample: int = 0, tokens: int = 5, drawn: bool = True) -> Measured:
    rng = np.random.default_rng(prompt)
    alpha = rng.random(tokens, np.float32)
    return Measured(
        prompt=prompt,
        sample=sample,
        prompt_tokens=7,
        first=8,
        ids=np.arange(8 + tokens, dtype=np.int32),
        alpha=alpha,
        entropy=rng.random(tokens, np.float32),
        below=np.zeros(tokens, np.float32),
        above=np.full(tokens, 0.25, np.float32),
        ratio=alpha if drawn else None,
    )


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, ABOUT)
    for prompt in (3, 1):
        store.put("arm", measured(prompt))
    store.put("other", measured(tokens=0, drawn=False))
    store.close()

    again = Trajectories(tmp_path, ABOUT)
    assert again.done("arm") == {(1, 0), (3, 0)}
    first, second = again.of("arm")
    assert (first.prompt, second.prompt) == (1, 3)
    for name in ("ids", "alpha", "entropy", "below", "above", "ratio"):
        np.testing.assert_array_equal(getattr(first, name), getattr(measured(1), name))
    assert first.lengths.tolist() == [8, 9, 10, 11, 12]
    assert first.positions.tolist() == [1, 2, 3, 4, 5]
    (empty,) = again.of("other")
    assert len(empty.alpha) == 0
    assert empty.ratio is None


def test_what_is_there_stays(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, ABOUT)
    store.put("arm", measured(1, tokens=5))
    store.put("arm", measured(1, tokens=9))
    assert [len(one.alpha) for one in store.of("arm")] == [5]


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"model": "cd", "temperature": 1.0}, 'model is "ab" there and "cd" now'),
        ({"model": "ab"}, "temperature is known on one side only"),
    ],
)
def test_other_measurements_are_refused(tmp_path: Path, about: dict, told: str) -> None:
    Trajectories(tmp_path, ABOUT).close()
    with pytest.raises(ValueError, match=told):
        Trajectories(tmp_path, about)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("this is no database, but long enough to be one" * 50)
    with pytest.raises(ValueError, match="no file of measurements"):
        Trajectories(tmp_path, ABOUT)


def test_a_killed_writer_leaves_whole_trajectories(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from calibrate_writer import measured\n"
        "from sparrow.calibrate.trajectories import Trajectories\n"
        f"store = Trajectories(sys.argv[1], {ABOUT!r})\n"
        "for number in range(10**6): store.put('arm', measured(number, tokens=2000))\n"
    )
    here = tmp_path / "calibrate_writer.py"
    here.write_text(Path(__file__).read_text())
    root = str(Path(__file__).parents[3])
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(tmp_path), root])
    while not (tmp_path / FILE).exists() or (tmp_path / FILE).stat().st_size < 200_000:
        time.sleep(0.01)
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = list(Trajectories(tmp_path, ABOUT).of("arm"))
    assert [one.prompt for one in found] == list(range(len(found)))
    assert all(len(one.alpha) == 2000 for one in found)
    assert len(found) > 1
