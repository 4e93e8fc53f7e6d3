"""Recall, mass and output error on the dense stream, by hand and at their limits."""

from itertools import pairwise

import torch
from support.engines import prompt
from torch import Tensor

from sparrow.calibration.flows.score import BLOCKS, QUERIES, Probe, Selection, blocks
from sparrow.calibration.replay import read
from sparrow.models.attention import Packed
from sparrow.sparse.flows.library import block_mean, dense, oracle, running_average, window
from sparrow.sparse.rule import Rule

NONE_DENSE: frozenset[int] = frozenset()


def case(flow, budget: int = 64, **settings) -> Selection:
    return Selection(
        rule=Rule(flow=flow, dense_layers=NONE_DENSE, **settings), page=16, budget=budget
    )


def test_blocks_are_spread_and_end_with_the_sequence() -> None:
    for length in (1, 15, 16, 17, 300, 512, 8192):
        found = list(blocks(length))
        assert found[-1][1] == length
        assert all(0 <= start < stop <= start + QUERIES for start, stop in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert len(found) <= max(BLOCKS + 1, length // QUERIES + 1)


def test_the_pass_is_dense_bit_for_bit(model) -> None:
    ids = prompt(200)
    probe = Probe([case(block_mean), case(oracle), case(block_mean, 200), case(dense)])
    looked = read(model, ids, probe)
    plain = read(model, ids, Packed(bounds=torch.tensor([0, 200])))
    assert torch.equal(looked.hidden_TC, plain.hidden_TC)
    found = [figures for figures, _ in probe.results()]
    assert [one.queries > 0 for one in found] == [True, True, False, False]
    assert found[2].recall is None  # a budget of the length drops nothing


def test_by_hand() -> None:
    """One query, one page of three free ones kept: everything from the definition of softmax."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(96, heads, 8, generator=rng) for heads in (4, 2, 2))
    probe = Probe([case(block_mean, 64)])  # of six pages the first, the last two and one more
    probe(0, q, k, v, scale=8**-0.5)
    every = [by_hand(q, k, v, at, budget=64) for block in blocks(96) for at in range(*block)]
    torch.testing.assert_close(probe._sums[0, 0], sum(every), atol=1e-5, rtol=1e-5)


def by_hand(q: Tensor, k: Tensor, v: Tensor, at: int, *, budget: int) -> Tensor:
    length, page = at + 1, 16
    pages, tail = -(-length // page), (length - 1) % page + 1
    count = (budget - tail) // page + 1
    if count >= pages:
        return torch.zeros(5, dtype=torch.float64)
    hits = wanted = 0
    mass, outs, kept_outs = 0.0, [], []
    for head in range(2):
        queries, keys, values = q[at, 2 * head : 2 * head + 2], k[:length, head], v[:length, head]
        weights = (queries @ keys.T * 8**-0.5).softmax(1)
        free = range(1, pages - 2)
        truth = {j: float(weights[:, j * page : (j + 1) * page].mean(0).sum()) for j in free}
        score = {j: float(queries.mean(0) @ keys[j * page : (j + 1) * page].mean(0)) for j in free}
        most = count - 3
        best = set(sorted(truth, key=truth.get)[-most:]) if most else set()
        chosen = set(sorted(score, key=score.get)[-most:]) if most else set()
        hits, wanted = hits + len(best & chosen), wanted + len(best)
        kept = {0, pages - 2, pages - 1} | chosen
        mask = torch.tensor([token // page in kept for token in range(length)])
        mass += float((weights * mask).sum(1).mean()) / 2
        outs.append(weights @ values)
        kept_weights = weights * mask
        kept_outs.append(kept_weights / kept_weights.sum(1, keepdim=True) @ values)
    out, kept_out = torch.cat(outs), torch.cat(kept_outs)
    error = float((kept_out - out).norm() / out.norm())
    return torch.tensor([hits, wanted, mass, error, 1.0], dtype=torch.float64)


def test_the_oracle_finds_nearly_every_page_and_beats_a_window(model) -> None:
    """Nearly: it leaves the weight of tokens in unfinished pages out of its sums."""
    rule = Rule(flow=block_mean, dense_layers=frozenset((0, 1)))
    others = [Selection(rule=rule, page=16, budget=64), case(running_average())]
    others += [case(block_mean, budget) for budget in (48, 96, 160)]
    probe = Probe([case(oracle), case(window), case(block_mean), *others])
    read(model, prompt(300), probe)
    results = probe.results()
    best, recent, mean = (found for found, _ in results[:3])
    assert best.recall > 0.99
    assert best.recall > mean.recall > recent.recall
    assert best.mass > mean.mass > recent.mass
    assert best.error < recent.error
    # Layers that a rule keeps dense are left out, and more budget keeps more.
    assert [sorted(layers) for _, layers in results[3:5]] == [[2], [0, 1, 2]]
    masses = [found.mass for found, _ in results[5:]]
    assert masses == sorted(masses)
