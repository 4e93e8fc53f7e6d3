"""Asynchronous runs made by hand: the real dispatcher and ledger, and groups of three tokens."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.dataflow.asynchronous.dispatch import Dispatcher
from sparrow.dataflow.asynchronous.prompt_ledger import Lease, PromptLedger
from sparrow.dataflow.run_files import CHECKPOINTS, write_rollouts
from sparrow.schema.asynchronous import PROMPTS, AsyncStatus, WorkerStatus
from sparrow.schema.episode import Group, Trajectory, Turn
from sparrow.schema.loading import save_resolved
from sparrow.schema.run_folder import METRICS
from sparrow.schema.train import TrainConfig
from sparrow.tasks.choosing import open_rows
from sparrow.training.objectives.advantages import informative
from support.run_folders import step as step_metrics
from support.run_folders import write_lines

STEPS = 6


def config(**sections: dict[str, Any]) -> TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny"},
        "data": {"task": "assignments", "length": 150},
        "rollout": {"prompts": 4, "samples": 2},
        "dispatch": {"staleness": 2, "group_filter": "informative"},
        "run": {"loop": "async", "steps": STEPS},
    }
    names = {*base, *sections}
    return TrainConfig.model_validate(
        {name: base.get(name, {}) | sections.get(name, {}) for name in names}
    )


def group(prompt: str, versions: tuple[int, ...]) -> Group:
    """Answers of two tokens behind a prompt of one; a version for each answer."""
    answers = tuple(
        Trajectory(
            prompt_id=prompt,
            ids=np.array([1, 2, 3]),
            loss_mask=np.array([False, True, True]),
            rollout_logprob=np.array([0.0, -1.0, -1.0]),
            weight_version=np.array([-1, version, version]),
            policy_id=np.array([-1, 0, 0]),
            turns=(Turn(start=0, stop=1, role="user"), Turn(start=1, stop=3, role="assistant")),
            reward=1.0,
        )
        for version in versions
    )
    return Group(prompt_id=prompt, trajectories=answers)


class Played:
    """A run that is played with random events into a folder; `metrics` are written by `close`."""

    def __init__(self, folder: Path, settings: TrainConfig | None = None, seed: int = 0) -> None:
        self.folder, self.config = folder, settings or config()
        self.random = random.Random(seed)
        folder.mkdir(parents=True)
        save_resolved(self.config, folder)
        (folder / METRICS).touch()
        self.rows = open_rows(self.config.data, seed=self.config.run.seed)
        dispatch = self.config.dispatch
        self.dispatcher = Dispatcher[Group](
            ledger=PromptLedger(folder / PROMPTS),
            batch=self.config.rollout.prompts,
            staleness=dispatch.staleness,
            replay=dispatch.replay,
            keeps=informative,
        )
        self.started: dict[int, Lease] = {}
        self.lines: list[dict[str, Any]] = []

    def step(self, *, recorded: bool = True) -> None:
        """Play until a batch was taken; recorded: with its metrics and rollouts."""
        own = self.dispatcher
        while (batch := own.take()) is None:
            self._event()
        if recorded:
            staleness = {"async/staleness_max": float(self._oldest(batch.step, batch.groups))}
            self.lines.append(step_metrics(batch.step, **staleness))
            write_lines(self.folder / METRICS, self.lines)
            write_rollouts(self.folder, batch.step, batch.groups)
            own.advance()

    def _oldest(self, step: int, groups: list[Group]) -> int:
        return max(step - int(t.weight_version.max()) for g in groups for t in g.trajectories)

    def _event(self) -> None:
        own, worker = self.dispatcher, str(self.random.randrange(3))
        starts = self.random.random() < 0.5 or not self.started
        if starts and (lease := own.next(worker)) is not None:
            self.started[lease.number] = lease
            return
        if not self.started:
            return
        lease = self.started.pop(self.random.choice(sorted(self.started)))
        if self.random.random() < 0.1:
            for lost in own.lose(own.under_way[lease.number][1]):
                self.started.pop(lost.number, None)
            return
        right = self.random.random() < 0.7
        prompt = self.rows.at(lease.position).id
        done = group(prompt, (lease.version, lease.version))
        own.finish(lease, (0.0, 1.0) if right else (1.0, 1.0), lease.version, done)

    def close(self) -> Path:
        self.dispatcher.ledger.close()
        return self.folder


def run(
    folder: Path, steps: int = STEPS, *, seed: int = 0, begun: bool = False, **sections: Any
) -> Path:
    """A run of so many steps; begun: the batch of one more is in its ledger."""
    played = Played(folder, config(**sections), seed)
    for _ in range(steps):
        played.step()
    if begun:
        played.step(recorded=False)
    return played.close()


def save_checkpoint(folder: Path, step: int) -> None:
    """A folder of that name: nobody reads what is in it."""
    (folder / CHECKPOINTS / f"step_{step:06d}").mkdir(parents=True)


def worker(name: str, **values: Any) -> WorkerStatus:
    return WorkerStatus(name=name, heard=1.5, **values)


def status(**changes: Any) -> AsyncStatus:
    values: dict[str, Any] = {
        "time": time.time(),
        "pid": 4242,
        "step": 3,
        "steps": STEPS,
        "version": 3,
        "staleness": 2,
        "phase": "learning",
        "under_way": 5,
        "buffer": 1,
        "batch": 4,
        "dropped": {"uninformative": 7},
        "again": 2,
        "rollout_idle": 0.25,
        "learner_idle": None,
        "worker_pid": 4343,
        "worker_restarts": 1,
        "evaluations_waiting": 1,
        "address": "http://127.0.0.1:7777",
        "workers": (
            worker("far", version=2, under_way=3, remote=True, dtype="bfloat16"),
            worker("new", version=None, under_way=0),
        ),
    }
    return AsyncStatus(**values | changes)
