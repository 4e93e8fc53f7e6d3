"""The gate beside torch: its bins in the engine's table."""

import inspect

from sparrow.gate import budgets
from sparrow.sparse.budgets import BudgetTable


def test_every_schedule_of_the_gate_fits_into_the_table() -> None:
    bins = inspect.signature(BudgetTable).parameters["bins"].default
    assert bins == budgets.MOST_BINS
