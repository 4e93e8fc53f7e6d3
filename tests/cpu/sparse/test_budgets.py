"""The device look-up gives what the schedules say, for every row, layer and length."""

import numpy as np
import pytest
import torch

from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule
from sparrow.sparse import preset
from sparrow.sparse.budgets import BudgetTable

LAYERS, KV_HEADS = 6, 3
PER_LAYER = Schedule(
    name="per-layer",
    lengths=[0, 50, 7000],
    budgets=[48, 64, 96],
    layers=[LayerBudgets(layer=1, budgets=[64, 64, 65]), LayerBudgets(layer=5, budgets=[48] * 3)],
    dense_layers=(0, 3),
)
BY_HEAD = Schedule(
    name="by-head",
    lengths=[0, 50],
    budgets=[48, 64],
    layers=[
        LayerBudgets(layer=2, budgets=[80, 80]),
        LayerBudgets(layer=2, head=1, budgets=[96, 112]),
        LayerBudgets(layer=4, head=0, budgets=[48, 4096]),
        LayerBudgets(layer=4, head=2, budgets=[49, 50]),
    ],
)
SCHEDULES = [preset("qwen3-1.7b-0.86"), PER_LAYER, Schedule.fixed(192), BY_HEAD]


def table_of(**sizes: int) -> BudgetTable:
    return BudgetTable(layers=LAYERS, kv_heads=KV_HEADS, **sizes)


def said(schedule: Schedule | None, length: int, layer: int) -> list[int]:
    """What each KV head keeps."""
    if schedule is None:
        return [DENSE] * KV_HEADS
    return [schedule.budget(length, layer, head) for head in range(KV_HEADS)]


def assert_looks_up(
    table: BudgetTable, held: list[Schedule | None], slots: list[int], lengths: list[int]
) -> None:
    """`held` is what each slot should hold; the dense one is None."""
    for dtype in (torch.int32, torch.int64):
        numbers = (torch.tensor(part, dtype=dtype) for part in (slots, lengths))
        budgets_LBG = table.lookup(*numbers)
        assert budgets_LBG.dtype == torch.int32
        assert budgets_LBG.is_contiguous()
        for layer, budgets_BG in enumerate(budgets_LBG.tolist()):
            pairs = zip(slots, lengths, strict=True)
            assert budgets_BG == [said(held[slot], length, layer) for slot, length in pairs]


def test_equals_the_schedules_over_random_lengths_and_edges() -> None:
    table = table_of(schedules=9, bins=20)
    assert [table.add(schedule) for schedule in SCHEDULES] == [1, 2, 3, 4]
    held = [None, *SCHEDULES]
    random = np.random.default_rng(0)
    starts = {int(start) for made in SCHEDULES for start in made.lengths}
    edges = {start + step for start in starts for step in (-1, 0, 1)}
    lengths = [*random.integers(0, 60_000, 300).tolist(), *(edges - {-1}), 2**31 - 1]
    for slot in range(5):
        assert_looks_up(table, held, [slot] * len(lengths), lengths)
    assert_looks_up(table, held, random.integers(0, 5, len(lengths)).tolist(), lengths)
    assert_looks_up(table, held, [], [])


def test_an_idle_slot_of_a_full_table_is_given_away_in_place() -> None:
    table = table_of(schedules=4)
    for schedule in SCHEDULES:
        table.add(schedule)
    addresses = table._starts_AE.data_ptr(), table._budgets_LAEG.data_ptr()
    fewer_bins = Schedule.fixed(4096, dense_layers=(2,))
    assert table.add(fewer_bins, in_use={2, 3, 4}) == 1
    lengths = [0, 49, 50, 1985, 40_000]
    for slot in range(5):
        assert_looks_up(table, [None, fewer_bins, *SCHEDULES[1:]], [slot] * 5, lengths)
    assert (table._starts_AE.data_ptr(), table._budgets_LAEG.data_ptr()) == addresses
    assert table.add(Schedule.fixed(4096, dense_layers=(2,))) == 1  # equals share a slot
    with pytest.raises(ValueError, match=SCHEDULES[0].name):
        table.add(SCHEDULES[0], in_use={1, 2, 3, 4})


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    table = table_of(schedules=1, bins=4)
    for schedule, field in (
        (preset("qwen3-1.7b-0.86"), "bins"),
        (PER_LAYER.replace(dense_layers=(0, 6)), "layers"),
        (Schedule.fixed(64, layers=[LayerBudgets(layer=9, budgets=[64])]), "layers"),
        (Schedule.fixed(64, layers=[LayerBudgets(layer=2, head=3, budgets=[64])]), "KV heads"),
        (Schedule.fixed(64, dense_layers=tuple(range(6))), "dense"),
    ):
        with pytest.raises(ValueError, match=field):
            table.add(schedule)
    assert table.add(PER_LAYER) == 1
    with pytest.raises(ValueError, match="per-layer"):  # the table is full
        table.add(Schedule.fixed(64))
    assert_looks_up(table, [None, PER_LAYER], [0, 1], [60, 60])
