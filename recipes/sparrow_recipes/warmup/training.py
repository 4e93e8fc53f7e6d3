"""`sparrow warmup`: train a small thinking model from random weights on puzzles.

A run directory holds the resolved configuration, one JSON line per step (curve.jsonl), the latest
checkpoint, and at the end the model. Started again, it goes on where it stopped.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparrow import load, random, save
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.run_files import LineFile, lines_by_step
from sparrow.engine.memory import host_memory
from sparrow.files import FolderLock, remove_unfinished, write_whole
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.decoder import DecoderLayer
from sparrow.models.spec import Rope
from sparrow.schema.loading import save_resolved
from sparrow.tasks.base import EOS, PAD, VOCABULARY, WORDS, puzzle_tokenizer
from sparrow_recipes.warmup.config import ShapeConfig, WarmupConfig
from sparrow_recipes.warmup.documents import PuzzleDocuments
from sparrow_recipes.warmup.supervised import StepStats, Supervised, packs

CURVE, CHECKPOINTS, MODEL = "curve.jsonl", "checkpoints", "model"
READ_EVERY = 20  # steps between reads of the loss, which wait for the device
REMOVE = "remove the run directory to begin anew"
OnStep = Callable[[dict[str, Any]], None]


def spec_of(shape: ShapeConfig) -> ModelSpec:
    """The decoder of a configuration, with the vocabulary of the puzzles."""
    return ModelSpec(
        **shape.model_dump(exclude={"name", "rope_theta", "seed", "start"}),
        family="qwen3",
        vocabulary=VOCABULARY,
        tied=True,
        rope=Rope(theta=shape.rope_theta),
        eos_ids=(WORDS.index(EOS),),
        pad_id=WORDS.index(PAD),
    )


def new_trainer(config: WarmupConfig, *, resumed: bool = False) -> Supervised:
    """The trainer at step 0, with the same random weights on every machine (drawn on the CPU).

    A resumed one gets its weights from a checkpoint, and skips the start.
    """
    device = pick_device(config.run.device)
    spec = spec_of(config.model)
    if config.model.start is None or resumed:
        model = random(spec, seed=config.model.seed)
    else:
        model = narrowed(load(config.model.start, dtype="float32", device="cpu"), spec)
    dtype = pick_dtype(config.run.dtype, device, {})
    return Supervised(model.to(device), config.optimiser, steps=config.steps, dtype=dtype)


def narrowed(model: Decoder, spec: ModelSpec) -> Decoder:
    """Convert a model to another spec, which may differ in context and MLP width only.

    Of every MLP the channels whose weights are largest stay, in their order.
    """
    width = min(spec.intermediate, model.spec.intermediate)
    if replace(model.spec, intermediate=width, max_positions=spec.max_positions) != spec:
        allowed = "the context and fewer MLP channels"
        raise ValueError(f"cannot convert {model.spec} to {spec}: only {allowed} may differ")
    small = random(spec, dtype=model.dtype, device=model.device)
    state = model.state_dict()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        gate, up = layer.mlp.gate_up.weight.detach().chunk(2)
        down = layer.mlp.down.weight.detach()
        weight = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
        keep = weight.topk(width).indices.sort().values
        state[f"layers.{index}.mlp.gate_up.weight"] = torch.cat((gate[keep], up[keep]))
        state[f"layers.{index}.mlp.down.weight"] = down[:, keep]
    small.load_state_dict(state)
    return small


def warm_up(
    config: WarmupConfig, *, until: int | None = None, on_step: OnStep | None = None
) -> Path | None:
    """Train to the end, or `until` a step; return the model's folder, or None at `until`.

    A run that has ended is not run again; a directory of another configuration is refused.
    """
    folder = run_directory(config)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; choose another run.out")
    if (folder / MODEL).exists():
        if load_checkpoint(config, folder) is None:
            raise ValueError(f"{folder} has a model but no checkpoint; choose another run.out")
        return folder / MODEL
    _check_memory(config)
    _check_stages(config)
    folder.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(folder)):
        remove_unfinished(folder)
        trainer = _resume(config, folder)
        _train_to(trainer, config, folder, until, on_step)
        if trainer.next < config.steps:
            return None
        return save(trainer.model.to(torch.bfloat16), folder / MODEL, tokenizer=puzzle_tokenizer())


def run_directory(config: WarmupConfig) -> Path:
    return config.run.out or Path("runs") / "warmup" / config.model.name


def load_checkpoint(config: WarmupConfig, folder: Path) -> dict[str, Any] | None:
    """The state in a run directory; None without one, ValueError if it is damaged."""
    faults: list[str] = []
    checkpoints = Checkpoints(folder / CHECKPOINTS, 1, report=faults.append)
    step = checkpoints.latest()
    if faults:
        raise ValueError(f"{faults[0]}; {REMOVE}")
    return None if step is None else checkpoints.load(step, _identity(config))


def _identity(config: WarmupConfig) -> str:
    """What must not change when a run is resumed: all settings but `run`, and the dtype."""
    dtype = pick_dtype(config.run.dtype, pick_device(config.run.device), {})
    return f"{dtype} {config.model_dump_json(exclude={'run'})}"


def _resume(config: WarmupConfig, folder: Path) -> Supervised:
    """The trainer at the start or at a checkpoint; the curve is cut there."""
    state = load_checkpoint(config, folder)
    trainer = new_trainer(config, resumed=state is not None)
    save_resolved(config, folder)
    if state is not None:
        trainer.restore(state)
    lines = lines_by_step(folder / CURVE) if state is not None else []
    kept = [line for step, line in lines if step < trainer.next]
    if len(kept) < trainer.next:
        counted = f"{len(kept)} of the {trainer.next} steps before the checkpoint"
        raise ValueError(f"{folder / CURVE} has {counted}; {REMOVE}")
    write_whole(folder / CURVE, kept)
    return trainer


def _train_to(
    trainer: Supervised,
    config: WarmupConfig,
    folder: Path,
    until: int | None,
    on_step: OnStep | None,
) -> None:
    """Train, with a line of the curve per step, and checkpoints."""
    checkpoints = Checkpoints(folder / CHECKPOINTS, 1)
    with closing(LineFile(folder / CURVE)) as curve:
        for line in train(trainer, config, until=until):
            curve.append(line)
            if on_step is not None:
                on_step(line)
            if line["step"] + 1 == trainer.next and trainer.next % config.run.save_every == 0:
                checkpoints.save(trainer.next, trainer.state(), _identity(config))
    checkpoints.save(trainer.next, trainer.state(), _identity(config))


def train(
    trainer: Supervised, config: WarmupConfig, *, until: int | None = None
) -> Iterator[dict[str, Any]]:
    """Run the remaining steps; their lines of the curve come a few steps late."""
    stop = min(config.steps, config.steps if until is None else until)
    make = PuzzleDocuments.of(config)
    unread: list[StepStats] = []
    begun = time.monotonic()
    for pack in packs(make, trainer.next, stop, workers=config.run.workers):
        unread.append(trainer.step(pack))
        at = trainer.next
        if at == stop or at % READ_EVERY == 0 or at % config.run.save_every == 0:
            lines = [stats.plain() for stats in unread]
            seconds = time.monotonic() - begun
            for line in lines:
                _refuse_nan(line)
                yield {**line, "seconds": round(seconds / len(lines), 4)}
            unread, begun = [], time.monotonic()


def _refuse_nan(line: dict[str, Any]) -> None:
    for name in ("loss", "gradient"):  # either spoils the weights
        if not line[name] < float("inf"):
            raise ValueError(f"step {line['step']}: the {name} is {line[name]}; lower the rate")


def _check_memory(config: WarmupConfig) -> None:
    """Raise if weights, gradients and moments of a shape exceed this machine's memory."""
    copies = 4 if pick_device(config.run.device).type == "cpu" else 1
    needed, there = copies * 4 * spec_of(config.model).parameters(), host_memory()
    if needed > there:
        raise ValueError(
            f"model: training this shape needs {needed / 2**30:.3g} GiB, this machine has "
            f"{there / 2**30:.3g} GiB"
        )


def _check_stages(config: WarmupConfig) -> None:
    """Make the first documents of every stage, so that an impossible stage fails at the start."""
    make, first = PuzzleDocuments.of(config), 0
    for stage in config.stages:
        make(first)
        first += stage.steps
