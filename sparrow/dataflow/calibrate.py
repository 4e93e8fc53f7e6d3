"""`sparrow calibrate`: measure a surface on prompts, in a folder that can be continued."""

import json
import platform
import re
import shlex
import sys
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import numpy as np

from sparrow.calibration.calibration import Calibration, Collector, Findings
from sparrow.calibration.replay import make_variant
from sparrow.calibration.store import Trajectories
from sparrow.dataflow.prompts import PromptSet
from sparrow.files import FolderLock, remove_unfinished
from sparrow.models import Decoder, fingerprint, tokenizer_digest
from sparrow.models.actor import adapter_digest
from sparrow.models.lora import Adapter
from sparrow.models.sources import model_name
from sparrow.models.spec import spec_to_hf
from sparrow.schema.calibrate import CalibrateConfig, PromptsConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface, Variant, reach
from sparrow.schema.types import Progress, Report
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.loading import load_flow, resolve_flow
from sparrow.sparse.rule import Rule

SURFACE, CHECK = "surface.json", "check.json"
PARTS = (16, 12, 8, 6, 4, 3, 2)  # default budgets: these parts of the longest length
BINS = 8
PAGE = 16
TARGET = 0.86
MEASURED = (
    *("variants", "cells", "floor", "positions", "layers", "drafts", "lengths", "undecided"),
)
FEWER = 0.75  # warn if fewer answers reach a bin than this share of dense answers


def calibrate(
    model: Decoder,
    source: PromptSet,
    config: CalibrateConfig,
    *,
    schedule: Schedule | None = None,
    actor: Adapter | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Surface:
    """Measure a surface, or check a schedule, and write the result into the folder.

    actor: the adapter of the sparse actor. Only one process at a time may use the folder.
    """
    place = config.folder
    place.mkdir(parents=True, exist_ok=True)
    longest = max(len(prompt.ids) for prompt in source.prompts)
    if source.mode == "generated":
        longest += config.answer_tokens
    longest = min(longest, model.spec.max_positions)  # at which a token may be drawn
    budgets = () if schedule is not None else config.budget or budgets_for(longest)
    settings: dict[str, Any] = {
        "budgets": tuple(sorted(set(budgets))),
        "edges": edges_for(longest, config.bin),
        "targets": config.target or (planned_target(schedule),),
    }
    with closing(FolderLock(place, setting="--out")):
        remove_unfinished(place)
        weights = fingerprint(model)
        if actor is not None:
            weights += f"+{adapter_digest(actor)}"
        store = Trajectories(place, about(model, weights, source, config))
        collector = Collector(model, source.prompts, source.mode, config, store, progress, actor)
        calibration = Calibration(collector, config, **settings, report=report)
        if schedule is None:
            calibration.run(_flows(model, config))
        else:
            flow = resolve_flow(schedule, config.first_flow)
            if config.draft_tokens:
                Rule.like(schedule, flow).check_drafts(config.draft_tokens, PAGE)
            calibration.check(flow, schedule)
        surface = _surface(model, weights, source, config, calibration)
        surface.save(place / (SURFACE if schedule is None else CHECK))
    return surface


def planned_target(schedule: Schedule | None) -> float:
    """Return the target that a schedule was planned for, if its provenance has one."""
    notes = {} if schedule is None else {note.key: note.text for note in schedule.provenance}
    target = re.search(r"acceptance at (0\.\d+)", notes.get("target", ""))
    return float(target[1]) if target else TARGET


def budgets_for(longest: int) -> list[int]:
    """Return default budgets in whole pages, from the smallest to half of the longest length."""
    return [max(4 * PAGE, longest // part // PAGE * PAGE) for part in PARTS]


def edges_for(longest: int, width: int | None = None) -> tuple[int, ...]:
    """Return edges of bins up to the longest length; about eight bins by default."""
    width = width or max(64, -(-longest // BINS // 64) * 64)
    return tuple(range(0, longest + width, width))


def _flows(model: Decoder, config: CalibrateConfig) -> list[tuple[Flow, Variant]]:
    """Return the flows to measure, with a variant for each choice of dense layers."""
    variants: dict[str, tuple[Flow, Variant]] = {}
    for text, dense in product(config.flow or ("block_mean",), config.dense_layers or ((),)):
        flow, last = load_flow(text), model.spec.layers - 1
        if flow.score is None:
            raise ValueError(f"the flow {text!r} is dense, which is always measured as the floor")
        if beyond := [layer for layer in dense if layer > last]:
            raise ValueError(f"dense_layers: the model has layers 0 to {last}, got {beyond}")
        name = flow.name + (f", dense {','.join(map(str, dense))}" if dense else "")
        if name in variants:
            raise ValueError(f"flows and dense layers must be unique, got {name!r} twice")
        variant = make_variant(flow, text, model.spec, name=name, dense_layers=dense)
        if config.draft_tokens:
            Rule(flow=flow, last=variant.last).check_drafts(config.draft_tokens, PAGE)
        variants[name] = (flow, variant)
    return list(variants.values())


def about(
    model: Decoder, weights: str, source: PromptSet, config: PromptsConfig
) -> dict[str, object]:
    """Return what all measurements of a folder have in common."""
    common: dict[str, object] = {
        "model": weights,
        "device": model.device.type,
        "prompts": source.digest,
        "mode": source.mode,
        "temperature": config.temperature,
    }
    if model.source is not None:
        common["tokenizer"] = tokenizer_digest(model.source)
    if source.mode == "generated":
        common |= {"samples": config.samples, "tokens": config.answer_tokens, "seed": config.seed}
    return common


def _surface(
    model: Decoder,
    weights: str,
    source: PromptSet,
    config: CalibrateConfig,
    calibration: Calibration,
) -> Surface:
    results = calibration.findings
    measured: dict[str, Any] = {name: tuple(getattr(results, name)) for name in MEASURED}
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
        seed=config.seed,
        temperature=config.temperature,
        max_tokens=config.answer_tokens,
        targets=tuple(calibration.targets),
        bins=tuple(calibration.edges),
        budgets=tuple(calibration.budgets),
        **measured,
        prompt_tokens=int(np.median(results.prompt_tokens)) if results.prompt_tokens else 0,
        warnings=tuple(warnings(results)),
        versions=_versions(),
        command=shlex.join(sys.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def warnings(results: Findings) -> list[str]:
    """Return warnings for readers of a surface."""
    texts = list(results.warnings)
    few = [cell.prompts for cell in results.cells if cell.prompts < LEAST_PROMPTS]
    if few:
        texts.append(
            f"{len(few)} of {len(results.cells)} cells have fewer than {LEAST_PROMPTS} prompts "
            f"(at least {min(few)}): their intervals are too narrow"
        )
    worst = min(results.floor, key=lambda cell: cell.p05, default=None)
    if worst is None:
        texts.append("no dense floor was measured: sequences are too short")
    elif worst.p05 < 0.99:
        texts.append(
            f"dense against dense p05 is {worst.p05:.3f} at lengths {worst.start} to {worst.stop}: "
            "the engine's rounding alone costs that much"
        )
    return texts + survivors(results)


def survivors(results: Findings) -> list[str]:
    """Warn of survivor bias: long bins show only the prompts whose sparse answers get there."""
    dense = reach(results.floor)
    arms: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in results.cells:
        arms.setdefault((cell.variant, cell.budget), []).append(cell)
    worst = [
        (share / dense[start], f"{name}{kept}, {share:.0%} of the prompts reach {start} tokens")
        for (name, budget), cells in arms.items()
        for kept in ["" if budget is None else f" under {budget} tokens"]
        for start, share in reach(cells).items()
        if dense.get(start, 0) > 0 and share < FEWER * dense[start]
    ]
    if not worst:
        return []
    biased = f"{len(worst)} cells have survivor bias: sparse answers end earlier than dense ones"
    return [f"{biased} (at worst {min(worst)[1]}); p05 there is of the prompts that got there"]


def _device(model: Decoder) -> str:
    if model.device.type != "cuda":
        return f"{model.device.type} ({platform.machine()})"
    import torch

    return torch.cuda.get_device_name(model.device)


def _versions() -> tuple[str, ...]:
    versions = [f"python {platform.python_version()}"]
    for package in ("sparrow-rl", "torch", "triton", "transformers", "numpy"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return tuple(versions)
