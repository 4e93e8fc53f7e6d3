"""The gate beside torch: its state in a checkpoint, its bins in the engine's table."""

import inspect
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")

import torch

from sparrow.gate import Gate, budgets
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import GateConfig
from sparrow.sparse.budgets import BudgetTable
from tests.support.tails import lived


def test_state_survives_a_checkpoint_of_plain_weights(tmp_path: Path) -> None:
    config = GateConfig(least=100, prompts=4)
    gate = Gate(config, Schedule.fixed(64), longest=512)
    lived(gate, range(2), lambda budgets, lengths: np.full(len(lengths), 0.8))
    torch.save(gate.state(), tmp_path / "gate.pt")
    state = torch.load(tmp_path / "gate.pt", weights_only=True)
    assert state == gate.state()
    assert Gate.restore(config, state).schedule == gate.schedule


def test_every_schedule_of_the_gate_fits_into_the_table() -> None:
    bins = inspect.signature(BudgetTable).parameters["bins"].default
    assert bins == budgets.MOST_BINS
