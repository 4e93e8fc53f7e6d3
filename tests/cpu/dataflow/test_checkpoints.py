"""Checkpoints: equal when read, whole or not there wherever a process dies, kept, refused."""

import errno
import json
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparrow.dataflow import checkpoints as states
from sparrow.dataflow.checkpoints import Checkpoints, Damaged
from sparrow.files import file_digest, read_document

CONFIG = "a configuration"
FILES = ("meta.json", "state.json", "state.safetensors")


def state(step: int) -> dict[str, Any]:
    return {
        "next": step,
        "model": OrderedDict(weight=torch.full((300, 7), float(step)), bias=torch.arange(3)),
        "optimiser": {
            "state": {0: {"step": torch.tensor(4.0)}},
            "groups": [{"betas": (0.9, 0.99)}],
        },
        "random": random.Random(step).getstate(),
        "generator": torch.Generator().manual_seed(step).get_state(),
        "none": None,
    }


def loaded_step(checkpoints: Checkpoints, step: int) -> int:
    """Read a checkpoint and require that all of it is of its step."""
    found = checkpoints.load(step, CONFIG)
    assert found["model"]["weight"].unique().tolist() == [float(step)]
    return found["next"]


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, report=list[str]().append)


def test_reads_what_was_written(kept: Checkpoints) -> None:
    assert kept.latest() is None
    assert kept.steps() == []
    written = state(10)
    place = kept.save(10, written, CONFIG)
    assert place == kept.folder / "step_000010"
    found = kept.load(10, CONFIG)
    assert found.keys() == written.keys()
    assert torch.equal(found["model"].pop("weight"), written["model"].pop("weight"))
    assert torch.equal(found["model"].pop("bias"), written["model"].pop("bias"))
    assert torch.equal(found.pop("generator"), written.pop("generator"))
    assert found == written
    meta = read_document(place / "meta.json")
    assert meta["step"] == 10
    assert meta["format"] == 2
    for name in ("state.json", "state.safetensors"):
        size, digest = (place / name).stat().st_size, file_digest(place / name)
        assert meta["files"][name] == {"bytes": size, "sha256": digest}
    # Nothing is pickled: everybody can read it.
    assert sorted(os.listdir(place)) == sorted(FILES)
    tensors = load_file(place / "state.safetensors")
    assert torch.equal(tensors["state['model']['weight']"], state(10)["model"]["weight"])
    assert json.loads((place / "state.json").read_text())["dict"][0] == ["next", 10]


def test_keeps_the_last(kept: Checkpoints) -> None:
    for step in (5, 10, 15, 20):
        kept.save(step, state(step), CONFIG)
    assert kept.steps() == [15, 20]
    assert kept.latest() == 20
    assert sorted(os.listdir(kept.folder)) == ["step_000015", "step_000020"]
    shutil.copytree(kept.folder / "step_000020", kept.folder / "step_000030")  # of another step
    assert kept.latest() == 20
    kept.save(999_999, state(1), CONFIG)
    kept.save(1_000_000, state(2), CONFIG)
    assert kept.latest() == 1_000_000


def test_a_step_that_is_there_stays_and_others_are_refused(kept: Checkpoints) -> None:
    kept.save(10, state(10), CONFIG)
    file = kept.folder / "step_000010" / "state.safetensors"
    before = file.stat().st_mtime_ns
    kept.save(10, state(10), CONFIG)
    assert file.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="configuration"):
        kept.save(10, state(10), "another")
    with pytest.raises(ValueError, match="step 5"):
        kept.save(5, state(5), CONFIG)
    with pytest.raises(ValueError, match=r"run\.out"):
        kept.load(10, "another")
    with pytest.raises(ValueError, match="step 7"):
        kept.load(7, CONFIG)


def test_another_format_is_refused_and_not_removed(kept: Checkpoints) -> None:
    """Also that of earlier versions, which had neither these files nor a digest."""
    place = kept.save(10, state(10), CONFIG)
    for name in ("state.json", "state.safetensors"):
        (place / name).unlink()
    for other in (1, 3):
        (place / "meta.json").write_text(json.dumps({"format": other, "step": 10}))
        for use in (kept.latest, lambda: kept.save(20, state(20), CONFIG)):
            with pytest.raises(ValueError, match=f"format {other}") as caught:
                use()
            assert not isinstance(caught.value, Damaged)
        assert place.exists()


def truncate(place: Path) -> None:
    content = (place / "state.safetensors").read_bytes()
    (place / "state.safetensors").write_bytes(content[:-100])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "short state": truncate,
    "no structure": lambda place: (place / "state.json").unlink(),
    "no meta": lambda place: (place / "meta.json").unlink(),
    "no text": lambda place: (place / "meta.json").write_bytes(b"\xff\xfe\xff"),
    "lacks keys": lambda place: (place / "meta.json").write_text('{"format": 2}'),
    "empty": lambda place: [(place / name).unlink() for name in FILES],
}


def test_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    for name, damage in DAMAGES.items():
        notes: list[str] = []
        kept = Checkpoints(tmp_path / name, 2, report=notes.append)
        for step in (10, 20):
            kept.save(step, state(step), CONFIG)
        damage(kept.folder / "step_000020")
        assert kept.steps() == [10], name
        assert not notes
        assert kept.latest() == 10
        assert len(notes) == 1
        assert "step_000020" in notes[0]
        with pytest.raises(Damaged, match="step_000020"):
            kept.load(20, CONFIG)
        kept.save(20, state(20), CONFIG)  # the run gets there again
        assert kept.steps() == [10, 20]
        assert loaded_step(kept, 20) == 20


def test_damage_anywhere_is_found_and_names_the_file(kept: Checkpoints) -> None:
    """Flipped bits and lost ends: never another exception, never other values."""
    place = kept.save(10, state(10), CONFIG)
    chance = random.Random(0)
    for name in FILES:
        whole = (place / name).read_bytes()
        for _ in range(60):
            content = bytearray(whole)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            if chance.random() < 0.2:
                del content[chance.randrange(len(content)) :]
            (place / name).write_bytes(content)
            with pytest.raises(Damaged, match=name.replace(".", r"\.")):
                kept.load(10, CONFIG)
        (place / name).write_bytes(whole)
    assert loaded_step(kept, 10) == 10


def test_forged_files_with_matching_digests(kept: Checkpoints) -> None:
    place = kept.save(10, state(10), CONFIG)
    for name, text in (
        ("state.json", "[1]"),
        ("state.json", '{"dict": [["a", {"tensor": "nowhere"}]]}'),
        ("state.json", '{"dict": [[[], 1]]}'),
        ("state.json", '{"call": "os.system"}'),
        ("state.json", "[" * 100_000),
        ("state.json", None),  # a pipe
        ("state.safetensors", "x" * 100),
    ):
        whole = {other: (place / other).read_bytes() for other in FILES}
        meta = read_document(place / "meta.json")
        (place / name).unlink()
        if text is None:
            os.mkfifo(place / name)
            meta["files"][name]["bytes"] = 0
        else:
            (place / name).write_text(text)
            meta["files"][name] = {"bytes": len(text), "sha256": file_digest(place / name)}
        (place / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(Damaged, match=name.replace(".", r"\.")) as caught:
            kept.load(10)
        assert str(caught.value).count("damaged") == 1
        (place / name).unlink()
        for other, content in whole.items():
            (place / other).write_bytes(content)
    assert loaded_step(kept, 10) == 10


def test_every_kind_of_tensor_comes_back(kept: Checkpoints) -> None:
    base = torch.randn(6, 4)
    base[0, 0], base[0, 1] = float("nan"), -0.0
    written = {
        "whole": base,
        "again": base,
        "part": base[1:3],
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 4),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "halves": torch.randn(7).bfloat16(),
        "ids": torch.tensor([2**62 + 1, -1]),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    kept.save(10, written, CONFIG)
    found = kept.load(10, CONFIG)
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bits(found[name]), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_plain_values_come_back_with_their_types(kept: Checkpoints) -> None:
    written = {
        "numbers": [1, True, float("nan"), -0.0, 1e-320, float("inf"), 2**70],
        "nested": ((1, [2, (3,)]), {}, [], ()),
        "text": "line\nend \ud800 \0 \x85",
        1: {-1: None, (2, "a"): "keys", "1": "another"},
        "tensor": {"tensor": "no tensor", "dict": 1},
    }
    kept.save(10, written, CONFIG)
    found = kept.load(10, CONFIG)
    assert repr(found) == repr(written)
    assert [type(value) for value in found["numbers"]] == [int, bool, *[float] * 4, int]


def test_unfinished_ones_are_ignored_then_cleared(kept: Checkpoints) -> None:
    kept.save(10, state(10), CONFIG)
    unfinished = kept.folder / ".step_000020.4194305.unfinished"  # beyond any process
    shutil.copytree(kept.folder / "step_000010", unfinished)
    assert (kept.steps(), kept.latest()) == ([10], 10)
    kept.save(20, state(20), CONFIG)
    assert sorted(os.listdir(kept.folder)) == ["step_000010", "step_000020"]


class Killed(BaseException):
    """Nothing runs after it."""


def die_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], bool]:
    """From the operation `count` on, nothing reaches the disk. Tells whether it came to that.

    The operation itself does half of its work where it can.
    """
    done = 0

    def deadly(act: Callable[..., Any], half: Callable[..., Any] | None) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done < count:
                return act(*arguments, **options)
            if done == count and half is not None:
                half(*arguments)
            raise Killed

        return operation

    def half_tree(path: Path, **_: object) -> None:
        for file in sorted(path.glob("*"))[:1]:
            file.unlink()

    def half_written(file: Any, _: object) -> None:
        file.write(b"half")

    write_tensors = deadly(states._write_tensors, half_written)
    monkeypatch.setattr(states, "_write_tensors", write_tensors)
    monkeypatch.setattr(shutil, "rmtree", deadly(shutil.rmtree, half_tree))
    monkeypatch.setattr(os, "rename", deadly(os.rename, None))
    monkeypatch.setattr(os, "replace", deadly(os.replace, None))
    monkeypatch.setattr(os, "fsync", deadly(os.fsync, None))
    return lambda: done >= count


def test_dying_anywhere_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for count in range(1, 100):
        kept = Checkpoints(tmp_path / str(count), 1)
        kept.save(10, state(10), CONFIG)
        with monkeypatch.context() as patched:
            died = die_at(patched, count)
            with suppress(Killed):
                kept.save(20, state(20), CONFIG)
            if not died():
                break
        again = Checkpoints(tmp_path / str(count), 1)
        latest = again.latest()
        assert latest is not None
        seen.add(latest)
        assert loaded_step(again, latest) == latest
        again.save(30, state(30), CONFIG)
        assert os.listdir(again.folder) == ["step_000030"]
    assert count > 9, "three files, two folders, three renames"
    assert seen == {10, 20}


def test_a_full_disk_says_what_to_do(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.EIO, "broken"), KeyboardInterrupt("broken")):  # as they are
        with monkeypatch.context() as patched:
            patched.setattr(states, "_write_tensors", Mock(side_effect=error))
            with pytest.raises(type(error), match="broken"):
                kept.save(10, state(10), CONFIG)
        assert os.listdir(kept.folder) == []
    kept.save(10, state(10), CONFIG)
    (kept.folder / ".notes").write_text("not ours")
    open_path = Path.open
    for name in ("state.json", "state.safetensors"):

        def full(path: Path, *arguments: Any, full: str = name, **options: Any) -> Any:
            target = Path("/dev/full") if path.name == full else path
            return open_path(target, *arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", full)
            with pytest.raises(OSError, match="step 10") as caught:
                kept.save(20, state(20), CONFIG)
        size = 300 * 7 * 4 + 3 * 8 + 4 + len(torch.Generator().get_state())
        assert f"{size / 2**20:.1f} MiB in {kept.folder}" in str(caught.value)
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(kept.folder)) == [".notes", "step_000010"]
        assert loaded_step(kept, 10) == 10


def test_what_cannot_be_read_back_is_refused_at_once(kept: Checkpoints) -> None:
    refused: list[tuple[dict[Any, Any], str]] = [
        ({"a": [np.float64(1.0)]}, r"state\['a'\]\[0\]"),
        ({"rng": np.random.default_rng(0)}, r"state\['rng'\]"),
        ({np.int64(1): 1}, "keys of state"),
        ({"dtype": torch.bfloat16}, r"state\['dtype'\]"),
        ({"bytes": b"a"}, r"state\['bytes'\]"),
        ({"a": (torch.zeros(2, dtype=torch.complex64),)}, "complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": torch.empty(2, device="meta")}, r"state\['a'\]"),
    ]
    for value, where in refused:
        with pytest.raises(ValueError, match=where):
            kept.save(10, value, CONFIG)
    assert kept.steps() == []
