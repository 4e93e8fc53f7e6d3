"""The file of measurements: nothing lost, nothing mixed, whatever somebody did to it."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from sparrow.calibration.store import ABOUT, EARLIER, FILE, MeasuredSequence, Store, Trajectories
from sparrow.files import add_line_digest, parse_line

SETTING = {"model": "ab", "temperature": 1.0}


def measured(prompt: int = 0, tokens: int = 5, drawn: bool = True) -> MeasuredSequence:
    alpha, entropy = np.random.default_rng(prompt).random((2, tokens), np.float32)
    parts = {"alpha": alpha, "entropy": entropy, "below": alpha * 0, "above": alpha * 0 + 0.25}
    parts |= {"ids": np.arange(8 + tokens, dtype=np.int32), "ratio": alpha if drawn else None}
    return MeasuredSequence(prompt=prompt, sample=0, prompt_tokens=7, first=8, **parts)


def test_what_is_put_comes_back_and_stays(tmp_path: Path) -> None:
    store = Trajectories(tmp_path, SETTING)
    for prompt in (3, 1):
        store.put("arm", measured(prompt))
    store.put("arm", measured(1, tokens=9))  # one that is there stays
    store.put("other", measured(tokens=0, drawn=False))
    again = Trajectories(tmp_path, SETTING)
    assert again.done("arm") == {(1, 0), (3, 0)}
    assert [*again.of("arm")] == [*store.of("arm")] == [measured(1), measured(3)]
    assert measured(1).lengths.tolist() == [8, 9, 10, 11, 12]
    assert [*again.of("other")] == [measured(tokens=0, drawn=False)]


def test_other_measurements_are_refused(tmp_path: Path) -> None:
    Trajectories(tmp_path, SETTING)
    for setting, told in (({**SETTING, "model": "cd"}, "model"), ({"model": "ab"}, "temperature")):
        with pytest.raises(ValueError, match=rf"{FILE} .*{told}"):
            Trajectories(tmp_path, setting)
    Store(tmp_path / "strange" / FILE).put({"format": 4}, SETTING)
    with pytest.raises(ValueError, match=FILE):
        Trajectories(tmp_path / "strange", SETTING)
    (tmp_path / EARLIER).touch()
    with pytest.raises(ValueError, match=EARLIER):
        Trajectories(tmp_path, SETTING)


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    """Flipped bits and lost ends: the file is named, or every row that is there is what it was."""
    store = Trajectories(tmp_path, SETTING)
    for prompt in range(4):
        store.put("arm", measured(prompt, tokens=100))
    whole, chance, refused = store.file.read_bytes(), random.Random(0), []
    for _ in range(150):
        content = bytearray(whole)
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del content[place:]
        store.file.write_bytes(content)
        try:
            again = Trajectories(tmp_path, SETTING)
            again.put("new", measured(9))
            assert all(row == measured(row.prompt, tokens=100) for row in again.of("arm"))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(store.file) in told for told in refused)


def test_a_last_line_without_its_end_goes(tmp_path: Path) -> None:
    store = Store(tmp_path / "figures.jsonl")
    for number in range(3):
        store.put({"number": number}, {"p05": 0.5})
    whole = store.file.read_bytes()
    store.file.write_bytes(whole[:-9])
    again = Store(store.file)
    assert [*again] == [{"number": 0}, {"number": 1}]
    again.put({"number": 2}, {"p05": 0.5})
    assert store.file.read_bytes() == whole
    store.file.write_text('{"key": {}, "figures": {}}\n{"key": {}}\n')  # of before digests
    with pytest.raises(ValueError, match=r"figures\.jsonl, line 2"):
        Store(store.file)


def test_rows_of_strangers_with_their_digests(tmp_path: Path) -> None:
    def packed(data: bytes) -> str:
        return base64.b64encode(zlib.compress(data)).decode()

    key = {"arm": "arm", "prompt": 1, "sample": 0}
    Trajectories(tmp_path, SETTING).put("arm", measured(1))
    first, row = (tmp_path / FILE).read_text().splitlines()
    figures = parse_line(row)["figures"]
    wrong = [(key, {name: value}) for name in ("first", "ids") for value in ("x", 1.5, 2**31, -1)]
    wrong += [(key, {"alpha": packed(b"\0" * size)}) for size in (399, 400, 1 << 27)]
    wrong += [(key, {"alpha": figures["alpha"][:-8]}), (key, {"more": 1})]
    wrong += [({**key, "prompt": value}, {}) for value in ("1", None, [], -1)]
    wrong += [({"arm": "arm"}, {}), ([], {}), ("arm", {}), (None, {})]
    for other, changes in wrong:
        line = add_line_digest(json.dumps({"key": other, "figures": figures | changes}))
        (tmp_path / FILE).write_text(f"{first}\n{line}\n")
        with pytest.raises(ValueError, match=FILE):
            [*Trajectories(tmp_path, SETTING).of("arm")]
    assert parse_line(first)["key"] == ABOUT


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / FILE
    other.touch()
    for make in (lambda: file.symlink_to(other), lambda: os.mkfifo(file)):
        make()
        with pytest.raises(ValueError, match=FILE):
            Trajectories(tmp_path, SETTING)
        file.unlink()
    assert other.read_bytes() == b""


def test_a_killed_writer_leaves_whole_trajectories(tmp_path: Path) -> None:
    code = (
        "from tests.pure.calibrate.test_store import *\n"
        f"store = Trajectories(sys.argv[1], {SETTING!r})\n"
        "for number in range(10**6): store.put('arm', measured(number, tokens=2000)); print(number)"
    )
    root = Path(__file__).parents[3]
    writer = subprocess.Popen(
        [sys.executable, "-uc", code, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    while writer.stdout.readline() != "5\n":
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    found = [*Trajectories(tmp_path, SETTING).of("arm")]
    assert [one.prompt for one in found] == list(range(len(found)))
    assert all(len(one.alpha) == 2000 for one in found)
    assert len(found) > 5


def test_several_processes_use_a_file(tmp_path: Path) -> None:
    """Each finds what the other wrote, and what is there is kept; half a line goes."""
    one, other = Store(tmp_path / "cells.jsonl"), Store(tmp_path / "cells.jsonl")
    one.put({"n": 1}, {"x": 1})
    assert other.get({"n": 1}) == {"x": 1}
    other.put({"n": 1}, {"x": 2})
    other.put({"n": 2}, {"x": 3})
    with (tmp_path / "cells.jsonl").open("ab") as file:
        file.write(b'{"key": {"n"')  # of a process that was killed
    one.put({"n": 3}, {"x": 4})
    for store in (one, other, Store(tmp_path / "cells.jsonl")):
        assert [store.get({"n": n}) for n in (1, 2, 3)] == [{"x": 1}, {"x": 3}, {"x": 4}]
