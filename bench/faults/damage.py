"""Damaged files: each is refused by a message with its name, or gives what it gave before.

A value that changes silently is a failure where the file carries a digest, and is counted where it
has none: rows and configurations, which people write.
"""

import hashlib
import json
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from faults import kills
from faults.outcomes import UNPROTECTED, Progress, Try, attempt

from sparrow.calibrate.surface import Surface
from sparrow.calibrate.trajectories import Trajectories
from sparrow.config import TrainConfig, load_config
from sparrow.config.resolved import read_resolved
from sparrow.dataflow.runs.checkpoints import Checkpoints
from sparrow.dataflow.runs.rollouts import read_rollouts
from sparrow.models import fingerprint, load, load_tokenizer, save
from sparrow.models.lora import Adapter
from sparrow.records import to_dict
from sparrow.report.page.runs import read_run
from sparrow.report.study.reading import read_study
from sparrow.sparse import Schedule
from sparrow.tasks.rows import FileRows

ROOT = Path(__file__).parents[2]


class Specimen(NamedTuple):
    """A file in a folder of the kind, and how what it says is read; digest: whether it has one."""

    kind: str
    folder: Path
    file: str
    read: Callable[[Path], Any]
    digest: bool = True


# Damage.


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One of a dozen kinds of damage, and the bytes after it, which differ."""
    place, other = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    byte = data[place] ^ (1 << rng.randrange(8))
    lines = data.split(b"\n")
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    swapped = list(lines)
    swapped[one], swapped[two] = lines[two], lines[one]
    kinds = {
        "a bit": data[:place] + bytes([byte]) + data[place + 1 :],
        "a digit": _digit(data, place, rng),
        "random bytes": data[:place] + rng.randbytes(16) + data[place + 16 :],
        "zeros": data[:place] + bytes(64) + data[place + 64 :],
        "cut off": data[:place],
        "cut out": data[:place] + data[other:],
        "twice": data[:other] + data[place:],
        "put in": data[:place] + rng.randbytes(8) + data[place:],
        "lines swapped": b"\n".join(swapped),
        "line lost": b"\n".join(lines[:one] + lines[one + 1 :]),
        "empty": b"",
        "a tail": data + rng.randbytes(32),
    }
    different = [(kind, made) for kind, made in kinds.items() if made != data]
    return rng.choice(different)


def _digit(data: bytes, place: int, rng: random.Random) -> bytes:
    """The next digit of a text turned into another one: what no parser can notice."""
    for at in range(place, len(data)):
        if 48 <= data[at] <= 57:
            return (
                data[:at]
                + bytes([48 + (data[at] - 48 + rng.randrange(1, 10)) % 10])
                + data[at + 1 :]
            )
    return data


# Specimens.


def specimens(place: Path) -> list[Specimen]:
    """Small files of every kind, made by the product itself."""
    run, own = place / "train" / "run", place / "calibrate" / "run"
    for name in ("train", "calibrate", "study"):
        (place / name).mkdir()
        _sparrow(*kills.VERBS[name].words(place / name))
    _sparrow("plan", str(own / "surface.json"), "-t", "0.6", "--allow-dense", "--no-plots")
    model, adapter, rows = place / "model", place / "adapter", place / "rows"
    tiny = load("tiny", device="cpu")
    save(tiny, model)
    Adapter.random(tiny.spec, 4, seed=0).save(adapter)
    rows.mkdir()
    lines = [{"prompt": f"what is {n}?", "answer": str(n), "data_source": "math"} for n in range(9)]
    (rows / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    (rows / "train.toml").write_text(kills.TRAIN, encoding="utf-8")
    step = f"checkpoints/step_{max(Checkpoints(run / 'checkpoints', 1).steps()):06d}"
    checkpoint = [f"{step}/{path.name}" for path in sorted((run / step).iterdir())]
    weights = [path.name for path in sorted(model.iterdir()) if path.name != "README.md"]
    return [
        Specimen("schedule", own, "schedule.json", lambda f: to_dict(Schedule.load(f / "schedule.json"))),
        Specimen("surface", own, "surface.json", lambda f: to_dict(Surface.load(f / "surface.json"))),
        Specimen("surface, plan (report)", own, "surface.json", _report),
        Specimen("surface, plan (report)", own, "plan.json", _report),
        Specimen("measurements", own, "measured.sqlite", _measured),
        *(Specimen("model", model, name, _model) for name in weights),
        *(Specimen("adapter", adapter, path.name, _adapter) for path in sorted(adapter.iterdir())),
        *(Specimen("checkpoint", run, name, _checkpoint) for name in checkpoint),
        Specimen("run (report)", run, "metrics.jsonl", _report),
        Specimen("run (report)", run, "validation.jsonl", _report),
        Specimen("run (report)", run, "config.resolved.toml", _report),
        Specimen("run (replay)", run, "config.resolved.toml", _resolved),
        Specimen("rollouts", run, "rollouts/step_000003.jsonl", _rollouts),
        *(
            Specimen("study", place / "study" / "run", name, _study)
            for name in ("design.json", "cells/dense-0/end.json", "cells/dense-0/tail.json")
            + ("cells/dense-0/metrics.jsonl", "cells/dense-0/validation.jsonl", "plans/p05-0.86.json")
        ),
        Specimen("rows", rows, "rows.jsonl", _rows, digest=False),
        Specimen("configuration", rows, "train.toml", _config, digest=False),
    ]  # fmt: skip


def _sparrow(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sparrow", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")


def _report(folder: Path) -> Any:
    run = read_run(folder)
    return [getattr(run, name) for name in run.__slots__ if name != "folder"]


def _measured(folder: Path) -> Any:
    """Every row that would be used again; rows that are gone are measured again."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    store = Trajectories(folder, about["about"])
    try:
        return {arm: [_plain(row) for row in store.of(arm)] for arm in about["arms"]}
    finally:
        store.close()


def _plain(record: Any) -> str:
    names = record.__slots__
    return hashlib.sha256(pickle.dumps([getattr(record, name) for name in names])).hexdigest()


def _model(folder: Path) -> Any:
    model, tokenizer = load(folder, device="cpu"), load_tokenizer(folder)
    template = tokenizer.chat_template
    return (
        fingerprint(model),
        model.spec,
        tokenizer.get_vocab(),
        template,
        str(tokenizer.backend_tokenizer.to_str()),
    )


def _adapter(folder: Path) -> Any:
    adapter = Adapter.load(folder, load("tiny", device="cpu").spec)
    return adapter.alpha, {name: t.tolist() for name, t in adapter.tensors().items()}


def _checkpoint(folder: Path) -> Any:
    """The latest checkpoint; where that is damaged it is passed over, which is said."""
    said: list[str] = []
    checkpoints = Checkpoints(folder / "checkpoints", 1, report=said.append)
    step = checkpoints.latest()
    if said or step is None:
        raise ValueError(said[0] if said else "no checkpoint")
    identity = (folder.parent / "identity.txt").read_text(encoding="utf-8")
    return step, _flat(checkpoints.load(step, identity))


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _flat(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_flat, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def _resolved(folder: Path) -> Any:
    return read_resolved(TrainConfig, folder)


def _rollouts(folder: Path) -> Any:
    return [[to_dict(one) for one in group.trajectories] for group in read_rollouts(folder, 3)]


def _study(folder: Path) -> Any:
    return repr(read_study(folder))


def _rows(folder: Path) -> Any:
    return FileRows.read(folder / "rows.jsonl").examples


def _config(folder: Path) -> Any:
    return load_config(TrainConfig, [folder / "train.toml"])


# The campaign.


def run(count: int, seed: int) -> list[Try]:
    rng, progress = random.Random(seed), Progress("files", count, every=50)
    with tempfile.TemporaryDirectory(prefix="damage-") as place:
        found = specimens(Path(place))
        _keep_identities(Path(place))
        right = {number: specimen.read(specimen.folder) for number, specimen in enumerate(found)}
        for number in range(count):
            index = number % len(found)
            progress.add(found[index].kind, *_tried(found[index], right[index], rng, Path(place)))
    return progress.tries


def _keep_identities(place: Path) -> None:
    """What a run and a calibration are opened with, which are not in their folders."""
    own = place / "calibrate" / "run"
    with sqlite3.connect(own / "measured.sqlite") as db:
        about = {
            key: json.loads(value) for key, value in db.execute("SELECT key, value FROM about")
        }
        arms = [arm for (arm,) in db.execute("SELECT DISTINCT arm FROM trajectories")]
    (own / "about.json").write_text(json.dumps({"about": about, "arms": arms}), encoding="utf-8")


def _tried(specimen: Specimen, right: Any, rng: random.Random, place: Path) -> tuple[str, str]:
    """Damage a copy of the folder, read it, and see."""
    copy = place / "copy" / specimen.folder.name
    shutil.rmtree(place / "copy", ignore_errors=True)
    shutil.copytree(specimen.folder, copy)
    how, data = damaged((copy / specimen.file).read_bytes(), rng)
    (copy / specimen.file).write_bytes(data)
    told = f"{specimen.file}, {how}"
    kind, value = attempt(lambda: specimen.read(copy))
    if kind == "value":
        same = value == right
        changed = "silent change" if specimen.digest else UNPROTECTED
        return ("same", "") if same else (changed, told)
    if kind == "refused" and str(copy) not in value and Path(specimen.file).name not in value:
        return "traceback", f"{told}: the file is not named: {value[:200]}"
    return kind, f"{told}: {value[:200]}"
