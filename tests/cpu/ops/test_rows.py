"""The definitions of a decode step's first and last act."""

import torch
from support.rowstates import make_draws, make_rows

from sparrow import ops


def test_inputs_of_a_row_are_its_own_and_padding_has_none() -> None:
    rows = make_rows(6, 4)
    rows.length_R[2] = 37
    step = ops.step_inputs(torch.tensor([2, 5]), rows, page=16, width=3)
    assert step.lengths_B.tolist() == [38, 0]
    assert step.positions_B.tolist() == [37, 0]
    assert step.slots_B.tolist() == [int(rows.table_RM[2, 2]) * 16 + 5, -1]
    assert torch.equal(step.table_BM, rows.table_RM[[2, 5], :3])
    assert step.ids_B[0] == rows.token_R[2]
    assert step.seeds_B[0] == rows.seed_R[2]
    assert step.counters_B[0] == rows.drawn_R[2]
    assert step.temperature_B[0] == rows.temperature_R[2]


def test_outputs_move_rows_on_and_pack_the_draws() -> None:
    rows, draws = make_rows(6, 4), make_draws(2)
    before = ops.RowState(*(tensor.clone() for tensor in rows))
    packed = ops.step_outputs(torch.tensor([2, 5]), draws, rows, advance=True)
    assert rows.token_R[2] == draws.tokens[0]
    assert rows.drawn_R[2] == before.drawn_R[2] + 1
    assert rows.length_R[2] == before.length_R[2] + 1
    assert rows.length_R[5] == -1
    assert torch.equal(rows.token_R[[0, 1, 3, 4]], before.token_R[[0, 1, 3, 4]])
    assert torch.equal(packed[0], draws.tokens.int())
    assert torch.equal(packed[1].view(torch.float32), draws.logprobs)
    assert torch.equal(packed[2].view(torch.float32), draws.entropies)
    assert torch.equal(packed[3].bool(), draws.ok)
    ops.step_outputs(torch.tensor([2]), make_draws(1), rows, advance=False)
    assert rows.length_R[2] == before.length_R[2] + 1
