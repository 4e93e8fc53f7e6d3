"""What ops refuse, by the names of their parameters; and how a version is chosen."""

from collections.abc import Callable

import pytest
import torch
from support.paging import make_batch

from sparrow import ops
from sparrow.sparse.rule import Rule

BATCH = make_batch([20])
ONES, INDEX, HIDDEN, HEAD = torch.ones(2), torch.arange(2), torch.zeros(2, 4), torch.zeros(9, 4)
LONGER = (torch.zeros(21, 6, 8), *BATCH.pool)  # more queries than tokens
LOGITS, SCORES, LENGTHS = torch.zeros(2, 5), torch.zeros(2, 2, 8), torch.tensor([32, 29])
QUERIES, KEYS, EDGES = torch.zeros(8, 2, 4), torch.zeros(8, 1, 4), torch.tensor([0, 8])


def decode(**changes: object) -> object:
    names = ("q_BHD", "k_NGPD", "v_NGPD", "table_BM", "lengths_B")
    arguments = dict(zip(names, (BATCH.q_BHD, *BATCH.pool), strict=True)) | {"lists": None}
    return ops.attend_decode(*(arguments | changes).values(), scale=1.0)


def select(budgets: torch.Tensor = INDEX, **changes: object) -> object:
    return ops.select_pages(SCORES, LENGTHS, budgets, **({"page": 4} | changes))


def sparse(bounds: torch.Tensor = EDGES, dense: torch.Tensor = INDEX[:1], **changes) -> object:
    budgets = torch.zeros(8, dtype=torch.long)
    options = {"page": 4, "scale": 1.0, "scorer": Rule().scorer(2, 4)} | changes
    return ops.attend_sparse(QUERIES, KEYS, KEYS, bounds, dense, budgets, **options)


def stats(ids: torch.Tensor = INDEX, **changes: object) -> object:
    return ops.token_stats(HIDDEN, HEAD, ids, **changes)


def lists(*pages: int, counts: tuple[int, ...] = (1, 2)) -> ops.PageLists:
    return ops.PageLists(torch.zeros(pages).int(), torch.ones(counts).int())


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("query heads", lambda: decode(q_BHD=BATCH.q_BHD[:, :5])),
    ("k_NGPD", lambda: decode(q_BHD=BATCH.q_BHD[:, :, :4])),
    ("v_NGPD", lambda: decode(v_NGPD=BATCH.v_NGPD[1:])),
    ("lengths_B", lambda: decode(lengths_B=torch.tensor([3, 4]))),
    ("table_BM", lambda: decode(table_BM=BATCH.table_BM.float())),
    ("table_BM", lambda: decode(table_BM=BATCH.table_BM[0])),
    ("lists", lambda: decode(lists=lists(1, 1, 2))),
    ("lists", lambda: decode(lists=lists(1, 2, 2, counts=(2, 2)))),
    ("budgets", lambda: select(torch.zeros(2, 3).int())),
    ("budgets", lambda: select(torch.zeros(3).int())),
    ("budgets", lambda: select(torch.zeros(2, 2))),
    ("page", lambda: select(page=0)),
    ("first", lambda: select(first=-1)),
    ("last", lambda: select(last=0)),
    *(("mass", lambda mass=mass: select(mass=mass)) for mass in (0.0, -0.5, 1.5, float("nan"))),
    ("bounds", lambda: sparse(dense=INDEX)),
    ("bounds", lambda: sparse(EDGES.float())),
    *(("bounds", lambda b=b: sparse(torch.tensor(b))) for b in ([0, 5], [3, 8])),
    ("bounds", lambda: sparse(torch.tensor([0, 5, 4, 8]), torch.zeros(3).int())),
    ("k_TGD", lambda: ops.attend_causal(QUERIES[1:], KEYS, KEYS, EDGES, scale=1.0)),
    ("head_VC", lambda: ops.logits(HIDDEN, torch.zeros(9, 5))),
    ("ids_T", lambda: stats(INDEX[1:])),
    ("ids_T", lambda: stats(INDEX + 8)),
    ("ids_T", lambda: stats(INDEX - 1)),
    ("temperature", lambda: stats(temperature=0)),
    ("temperature", lambda: stats(temperature=torch.tensor(-1.0))),
    ("temperature", lambda: stats(temperature=torch.tensor([1.0, 0.0]))),
    ("temperature", lambda: stats(temperature=torch.ones(2, requires_grad=True))),
    ("chunk", lambda: ops.acceptance(HIDDEN, HIDDEN, HEAD, chunk=-1)),
    ("q_TC", lambda: ops.acceptance(HIDDEN, HIDDEN[1:], HEAD)),
    ("q_head_VC", lambda: ops.acceptance(HIDDEN, HIDDEN, HEAD, q_head_VC=HEAD[1:])),
    ("top_k", lambda: ops.compare(HIDDEN, HIDDEN, HEAD, INDEX, top_k=10)),
    ("logits_BV", lambda: ops.sample(torch.zeros(5), INDEX, INDEX, ONES)),
    ("logits_BV", lambda: ops.sample(torch.zeros(2, 0), INDEX, INDEX, ONES)),
    ("seeds_B", lambda: ops.sample(LOGITS, ONES, INDEX, ONES)),
    ("counters_B", lambda: ops.sample(LOGITS, INDEX, torch.arange(3), ONES)),
    ("temperature_B", lambda: ops.sample(LOGITS, INDEX, INDEX, ONES[:1])),
    ("forbidden_BS", lambda: ops.sample(LOGITS, INDEX, INDEX, ONES, forbidden_BS=INDEX)),
    ("row 0", lambda: ops.attend_causal_paged(*LONGER, torch.tensor([0, 21]), scale=1.0)),
    ("refrence", lambda: ops.using("refrence").__enter__()),
]


def test_what_breaks_a_contract_is_named() -> None:
    for field, call in REFUSED:
        with pytest.raises(ValueError, match=field):
            call()


def test_what_keeps_the_contracts_is_taken() -> None:
    for call in (decode, select, sparse, stats):
        call()


def test_an_op_is_its_definition_with_a_name_and_a_contract() -> None:
    assert ops.sample.name == "sample"
    assert "Draw one token per row" in (ops.sample.__doc__ or "")
    leaf = torch.zeros(1, 4, requires_grad=True)
    assert not ops.acceptance(leaf, leaf, HEAD).requires_grad
    assert ops.logits(leaf, HEAD).requires_grad
