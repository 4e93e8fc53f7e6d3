"""`sparrow calibrate`: a model and a source of prompts to a surface, in a folder that goes on."""

import json
import platform
import shlex
import sys
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibrate.arms import variant_of
from sparrow.calibrate.calibration import Calibration, Found, Report, Settings
from sparrow.calibrate.collecting import Collector, Progress, Sampling
from sparrow.calibrate.trajectories import Trajectories
from sparrow.dataflow.prompts import Source
from sparrow.files import FolderLock, remove_unfinished
from sparrow.models import Decoder, fingerprint, tokenizer_digest
from sparrow.models.sources import model_name
from sparrow.models.spec import spec_to_hf
from sparrow.schema.base import Record
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface, Variant, reach
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.loading import load_flow, resolve_flow

SURFACE, CHECK = "surface.json", "check.json"
PARTS = (16, 12, 8, 6, 4, 3, 2)  # default budgets: these parts of the longest length
BINS = 8
PAGE = 16
FOUND = ("variants", "cells", "floor", "positions", "layers", "lengths", "undecided")
FEWER = 0.75  # of the share of dense answers that reach a bin: then it is said


class Request(Record):
    """What to calibrate: flows by how they are named, or one schedule to check."""

    flows: tuple[str, ...] = ("block_mean",)
    dense_layers: tuple[tuple[int, ...], ...] = ((),)  # sets of layers that stay dense
    schedule: Schedule | None = None
    flow: str | None = None  # of the schedule; None: the one that it names itself
    page: int = 16
    first: int = 1
    last: int = 2


def calibrate(
    model: Decoder,
    source: Source,
    request: Request,
    settings: Settings,
    sampling: Sampling,
    folder: str | Path,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Surface:
    """Measure, write the surface (of a schedule: the check) into the folder, and give it back.

    One process at a time may have the folder.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(place, setting="--out")):
        remove_unfinished(place)
        weights = fingerprint(model)
        with closing(Trajectories(place, _about(model, weights, source, sampling))) as store:
            collector = Collector(model, source.prompts, source.mode, sampling, store, progress)
            found = _found(model, request, Calibration(collector, settings, report))
        checked = request.schedule is not None
        settings = settings.replace(budgets=()) if checked else settings
        made = _surface(model, weights, source, settings, sampling, found)
        made.save(place / (CHECK if checked else SURFACE))
    return made


def _found(model: Decoder, request: Request, calibration: Calibration) -> Found:
    if request.schedule is None:
        return calibration.run(_flows(model, request))
    return calibration.check(resolve_flow(request.schedule, request.flow), request.schedule)


def longest_of(source: Source, model: Decoder, most: int) -> int:
    """The greatest total length at which a token may be drawn, with answers of `most` tokens."""
    own = max(len(prompt.ids) for prompt in source.prompts)
    return min(own + (most if source.mode == "generated" else 0), model.spec.max_positions)


def budgets_for(longest: int) -> list[int]:
    """Whole pages, from the least that keeps a choice to half of the longest length."""
    return [max(4 * PAGE, longest // part // PAGE * PAGE) for part in PARTS]


def edges_for(longest: int, width: int | None = None) -> tuple[int, ...]:
    """Edges of bins that reach the longest length; about eight where no width is given."""
    wide = width or max(64, -(-longest // BINS // 64) * 64)
    return tuple(range(0, longest + wide, wide))


def _flows(model: Decoder, request: Request) -> list[tuple[Flow, Variant]]:
    places: dict[str, Any] = {key: getattr(request, key) for key in ("page", "first", "last")}
    found = []
    for text in request.flows:
        flow = load_flow(text)
        if flow.score is None:
            raise ValueError(f"the flow {text!r} is dense: the floor measures that already")
        for dense in request.dense_layers:
            beyond = [layer for layer in dense if layer >= model.spec.layers]
            if beyond:
                most = model.spec.layers - 1
                raise ValueError(f"dense layers {beyond}: the model has layers 0 to {most}")
            name = flow.name + (f", dense {','.join(map(str, dense))}" if dense else "")
            made = variant_of(flow, text, model.spec, name=name, dense_layers=dense, **places)
            found.append((flow, made))
    names = [made.name for _, made in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r} was given twice")
    return found


def _about(model: Decoder, weights: str, source: Source, sampling: Sampling) -> dict[str, object]:
    """What all measurements of a folder share."""
    about: dict[str, object] = {
        "model": weights,
        "device": model.device.type,
        "prompts": source.digest,
        "mode": source.mode,
        "temperature": sampling.temperature,
    }
    if model.source is not None:
        about["tokenizer"] = tokenizer_digest(model.source)
    if source.mode == "generated":
        drawn = {"samples": sampling.samples, "tokens": sampling.max_tokens, "seed": sampling.seed}
        about |= drawn
    return about


def _surface(
    model: Decoder,
    weights: str,
    source: Source,
    settings: Settings,
    sampling: Sampling,
    found: Found,
) -> Surface:
    measured: dict[str, Any] = {name: tuple(getattr(found, name)) for name in FOUND}
    dtype = str(model.dtype).removeprefix("torch.")
    return Surface(
        model=model_name(model),
        family=model.spec.family,
        fingerprint=weights,
        shape=json.dumps(spec_to_hf(model.spec, dtype)),
        dtype=dtype,
        device=_device(model),
        mode=source.mode,
        prompts=source.name,
        prompts_digest=source.digest,
        seed=sampling.seed,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        targets=settings.targets,
        bins=settings.edges,
        budgets=settings.budgets,
        **measured,
        prompt_tokens=int(np.median(found.prompt_tokens)) if found.prompt_tokens else 0,
        warnings=tuple(warnings(found)),
        versions=_versions(),
        command=shlex.join(sys.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def warnings(found: Found) -> list[str]:
    """What a reader of the surface should not overlook."""
    said = list(found.warnings)
    few = [cell for cell in found.cells if cell.prompts < LEAST_PROMPTS]
    if few:
        least = min(cell.prompts for cell in few)
        said.append(
            f"{len(few)} of {len(found.cells)} cells have fewer than {LEAST_PROMPTS} prompts (one "
            f"has {least}): their intervals are too narrow"
        )
    low = [cell for cell in found.floor if cell.p05 < 0.99]
    if low:
        worst = min(low, key=lambda cell: cell.p05)
        said.append(
            f"dense against dense p05 is {worst.p05:.3f} at lengths {worst.start} to {worst.stop}: "
            "an engine's rounding alone costs that much"
        )
    said += survivors(found)
    if not found.floor:
        said.append("no dense floor was measured: sequences are too short")
    return said


def survivors(found: Found) -> list[str]:
    """Where a budget cuts answers short, its long bins show only those prompts that got there."""
    dense = reach(found.floor)
    arms: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in found.cells:
        arms.setdefault((cell.variant, cell.budget), []).append(cell)
    worst = [
        (share / dense[start], f"{share:.0%} of the prompts reach {start} tokens", name, budget)
        for (name, budget), cells in arms.items()
        for start, share in reach(cells).items()
        if dense.get(start, 0) > 0 and share < FEWER * dense[start]
    ]
    if not worst:
        return []
    _, what, name, budget = min(worst, key=lambda one: one[0])
    kept = "" if budget is None else f" under {budget} tokens"
    least = f"at worst {name}{kept}, {what}"
    said = (
        f"{len(worst)} cells show survivors: sparse answers end earlier than dense ones ({least})"
    )
    return [f"{said}; p05 there is of the prompts that got there"]


def _device(model: Decoder) -> str:
    if model.device.type != "cuda":
        return f"{model.device.type} ({platform.machine()})"
    import torch

    return torch.cuda.get_device_name(model.device)


def _versions() -> tuple[str, ...]:
    found = [f"python {platform.python_version()}"]
    for package in ("sparrow-rl", "torch", "triton", "transformers", "numpy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return tuple(found)
