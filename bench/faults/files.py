"""Damaged files: each is refused with its name, or read with the same result.

A value that changes silently is a failure where the file carries a digest, and is counted where it
has none: rows and configurations, which people write.
"""

import hashlib
import json
import operator
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from faults import kills
from faults.outcomes import UNPROTECTED, Progress, Try, attempt

from sparrow.calibration.store import Trajectories
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.run import open_parts
from sparrow.dataflow.run_files import read_rollouts
from sparrow.files import read_lines
from sparrow.models import fingerprint, load, load_tokenizer, save
from sparrow.models.lora import Adapter
from sparrow.schema.base import to_dict
from sparrow.schema.loading import load_config, read_resolved
from sparrow.schema.run_folder import read_run
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig
from sparrow.tasks.rows import FileRows
from sparrow_recipes.study.files import read_study

TINY = load("tiny", device="cpu")
REPORTED = ("metrics.jsonl", "validation.jsonl", "config.resolved.toml")


class Specimen(NamedTuple):
    """A file in a folder of the kind, and how what it says is read; digest: whether it has one."""

    kind: str
    folder: Path
    file: str
    read: Callable[[Path], Any]
    digest: bool = True
    same: Callable[[Any, Any], bool] = operator.eq  # what was read, and what was written


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    """Try damaged files, of each kind in turn."""
    rng, progress = random.Random(seed), Progress("files", count, every=50)
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        place = Path(name)
        made = specimens(place)
        right = [specimen.read(specimen.folder) for specimen in made]
        for number in range(count):
            index = number % len(made)
            progress.add(made[index].kind, *_tried(made[index], right[index], rng, place))
    return progress.tries


def _tried(specimen: Specimen, right: Any, rng: random.Random, place: Path) -> tuple[str, str]:
    """Damage a copy of the folder, read it, and classify the outcome."""
    copy = place / "copy" / specimen.folder.name
    shutil.rmtree(place / "copy", ignore_errors=True)
    shutil.copytree(specimen.folder, copy)
    how, data = damaged((copy / specimen.file).read_bytes(), rng)
    (copy / specimen.file).write_bytes(data)
    case = f"{specimen.file}, {how}"
    kind, value = attempt(lambda: specimen.read(copy))
    if kind == "value":
        changed = "silent change" if specimen.digest else UNPROTECTED
        return ("same", "") if specimen.same(value, right) else (changed, case)
    if kind == "refused" and Path(specimen.file).name not in value:
        return "traceback", f"{case}: the file is not named: {value[:200]}"
    return kind, f"{case}: {value[:200]}"


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One of a dozen kinds of damage, and the bytes after it, which differ."""
    place, other = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    lines = data.split(b"\n")
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    swapped = list(lines)
    swapped[one], swapped[two] = lines[two], lines[one]
    kinds = {
        "a bit": data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :],
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
    return rng.choice([(kind, made) for kind, made in kinds.items() if made != data])


def _digit(data: bytes, place: int, rng: random.Random) -> bytes:
    """Change a digit of a text, which no parser can notice."""
    for at in range(place, len(data)):
        if 48 <= data[at] <= 57:
            digit = 48 + (data[at] - 48 + rng.randrange(1, 10)) % 10
            return data[:at] + bytes([digit]) + data[at + 1 :]
    return data


# Specimens.


def specimens(place: Path) -> list[Specimen]:
    """Small files of every kind, made by the product itself."""
    for name in ("train", "calibrate", "study"):
        (place / name).mkdir()
        _sparrow(*kills.VERBS[name].words(place / name))
    return [
        *_of_calibration(place / "calibrate" / "run"),
        *_of_models(place),
        *_of_run(place / "train" / "run"),
        *_of_study(place / "study" / "run"),
        *_by_hand(place / "rows"),
    ]


def _sparrow(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sparrow", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")


def _of_calibration(folder: Path) -> list[Specimen]:
    surface = str(folder / "surface.json")
    _sparrow("plan", surface, "-t", "0.6", "--allow-dense", "--no-plots")
    first, *rows = read_lines(folder / "measured.jsonl")
    arms = sorted({row["key"]["arm"] for row in rows})

    def measured(copy: Path) -> Any:
        store = Trajectories(copy, first["figures"])
        return [_plain(_fields(row)) for arm in arms for row in store.of(arm)]

    def within(rows: Any, right: Any) -> bool:
        """Rows that are gone are measured again."""
        return all(row in right for row in rows)

    return [
        Specimen("schedule", folder, "schedule.json", lambda f: Schedule.load(f / "schedule.json")),
        Specimen("surface", folder, "surface.json", lambda f: Surface.load(f / "surface.json")),
        Specimen("surface, in a report", folder, "surface.json", _report),
        Specimen("plan, in a report", folder, "plan.json", _report),
        Specimen("measurements", folder, "measured.jsonl", measured, same=within),
    ]


def _of_models(place: Path) -> list[Specimen]:
    save(TINY, place / "model")
    Adapter.random(TINY.spec, 4, alpha=8, seed=0).save(place / "adapter")
    return [
        Specimen(kind, place / kind, path.name, read)
        for kind, read in (("model", _model), ("adapter", _adapter))
        for path in sorted((place / kind).iterdir())
    ]


def _of_run(folder: Path) -> list[Specimen]:
    with open_parts(read_resolved(TrainConfig, folder), folder) as run:
        identity = run.ledger.identity

    def checkpoint(copy: Path) -> Any:
        """The latest; a damaged one is skipped and reported."""
        said: list[str] = []
        checkpoints = Checkpoints(copy / "checkpoints", 1, report=said.append)
        step = checkpoints.latest()
        if said or step is None:
            raise ValueError(said[0] if said else "no checkpoint")
        return step, _plain(checkpoints.load(step, identity))

    last = sorted((folder / "checkpoints").glob("step_*"))[-1]
    return [
        *(
            Specimen("checkpoint", folder, str(path.relative_to(folder)), checkpoint)
            for path in sorted(last.iterdir())
        ),
        *(Specimen("run, in a report", folder, name, _report) for name in REPORTED),
        Specimen(
            "run, to replay", folder, "config.resolved.toml", partial(read_resolved, TrainConfig)
        ),
        Specimen("rollouts", folder, "rollouts/step_000003.jsonl", _rollouts),
    ]


def _of_study(folder: Path) -> list[Specimen]:
    cell = ("end.json", "tail.json", "start.json", "metrics.jsonl", "validation.jsonl")
    names = ["design.json", "plans/p05-0.86.json", *(f"cells/p05-0.86-0/{name}" for name in cell)]
    return [Specimen("study", folder, name, _study) for name in names]


def _by_hand(folder: Path) -> list[Specimen]:
    """What people write themselves has no digest."""
    folder.mkdir()
    rows = [{"prompt": f"what is {n}?", "answer": str(n), "data_source": "math"} for n in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    shutil.copy(kills.TRAIN, folder)
    return [
        Specimen("rows", folder, "rows.jsonl", _rows, digest=False),
        Specimen("configuration", folder, "train.toml", _config, digest=False),
    ]


# What files say, as values that can be compared.


def _rows(folder: Path) -> Any:
    return FileRows.read(folder / "rows.jsonl").examples


def _config(folder: Path) -> Any:
    return load_config(TrainConfig, [folder / "train.toml"])


def _report(folder: Path) -> Any:
    return _fields(read_run(folder))


def _study(folder: Path) -> Any:
    return _fields(read_study(folder))


def _fields(record: Any) -> list[Any]:
    return [getattr(record, name) for name in record.__slots__ if name != "folder"]


def _plain(value: Any) -> Any:
    """Tensors and arrays as digests of their bytes, containers by their kind."""
    if isinstance(value, dict):
        return [(str(key), _plain(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, torch.Tensor):
        value = value.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else value


def _model(folder: Path) -> Any:
    model, tokenizer = load(folder, device="cpu"), load_tokenizer(folder)
    words = tokenizer.backend_tokenizer.to_str()
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return fingerprint(model), model.spec, words, tokenizer.chat_template, special


def _adapter(folder: Path) -> Any:
    adapter = Adapter.load(folder, TINY.spec, dtype=torch.float32, device="cpu")
    return adapter.alpha, adapter.rslora, _plain(adapter.tensors())


def _rollouts(folder: Path) -> Any:
    return [[to_dict(one) for one in group.trajectories] for group in read_rollouts(folder, 3)]
