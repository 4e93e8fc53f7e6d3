"""The asynchronous loop: equal to the synchronous one at staleness 0, bounded above, and every
prompt ends once whatever is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rewards import row_file, verl
from support.training import SPARSE, Hears, metrics, weights_of
from support.training import settings as settings_of

from sparrow.dataflow.asynchronous.prompt_ledger import LedgerAudit, PromptLedger
from sparrow.dataflow.asynchronous.rollout import PROMPT_LEDGER, AsyncRolloutSide
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.run_files import read_rollouts
from sparrow.schema.train import TrainConfig

OWN_TO_A_LOOP = ("timing_s/", "perf/", "async/")
EPISODES = "support.async_episodes"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    prompts = [[{"role": "user", "content": f"{n} + {n + 1} = ?"}] for n in range(40)]
    return row_file(folder / "rows.jsonl", [verl(n, prompt=p) for n, p in enumerate(prompts)])


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.training import model_folder

    return model_folder(tmp_path_factory.mktemp("async") / "model", chat=True)


def chosen(model: Path, folder: Path, rows: Path, loop: str, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "data": {"rows": str(rows), "reward": "support.rewards:odd", "workers": 1},
        "rollout": {"attention": SPARSE},
        "run": {"loop": loop, "steps": 4},
    }
    merged = {key: {**base.get(key, {}), **changes.get(key, {})} for key in {*base, *changes}}
    plain = settings_of(model, folder, **merged)
    plain["data"] = merged["data"]
    return TrainConfig.model_validate_json(json.dumps(plain))


def run_whole(settings: TrainConfig, watch: Hears | None = None) -> Run:
    with open_run(settings, callbacks=watch or Hears()) as run:
        train(run)
    return run


def audit(folder: Path) -> LedgerAudit:
    with PromptLedger(folder / PROMPT_LEDGER) as ledger:
        return ledger.audit(len(metrics(folder)))


def common(folder: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on time."""
    return [
        {name: value for name, value in step.items() if not name.startswith(OWN_TO_A_LOOP)}
        for step in metrics(folder)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_staleness_0_is_the_synchronous_loop(
    chat_model: Path, rows: Path, tmp_path: Path, algorithm: str
) -> None:
    weights = {}
    for loop in ("sync", "async"):
        settings = chosen(
            chat_model,
            tmp_path / loop,
            rows,
            loop,
            algorithm={"name": algorithm, "refills": 100},
            dispatch={"staleness": 0, "in_flight": "restart"},
            gate={"mode": "off"} if algorithm == "dapo" else {},
        )
        weights[loop] = weights_of(run_whole(settings))
    for name, weight in weights["sync"].items():
        assert torch.equal(weight, weights["async"][name]), name
    left_out = {"data/rounds"} if algorithm == "dapo" else set()
    for here, there in zip(common(tmp_path / "sync"), common(tmp_path / "async"), strict=True):
        assert {k: v for k, v in here.items() if k not in left_out} == {
            k: v for k, v in there.items() if k not in left_out
        }
    for step in range(4):
        pairs = zip(
            read_rollouts(tmp_path / "sync", step),
            read_rollouts(tmp_path / "async", step),
            strict=True,
        )
        assert all(here == there for here, there in pairs)
    assert audit(tmp_path / "async").problems == ()
