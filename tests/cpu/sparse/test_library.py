"""Every flow that comes with Sparrow, against pages worked out by hand or in plain loops."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import ops
from sparrow.schema.schedule import DENSE
from sparrow.sparse.flows import interpret, library, loading
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.interpret import ScoreContext
from sparrow.sparse.rule import Rule

Array = np.ndarray[Any, Any]
GROUP, SIZE = 2, 8
TEXT = (Path(__file__).parents[3] / "docs/flows.md").read_text(encoding="utf-8")


def scores(flow: Flow, q_RD: Array, k_MPD: Array, v_MPD: Array) -> Array:
    """Of one KV head's pages, all finished, by the definition."""
    page = k_MPD.shape[1]
    program = trace(flow, page, q_RD.shape[1], len(q_RD))
    k, v = (torch.from_numpy(x.astype(np.float32))[:, None] for x in (k_MPD, v_MPD))
    blocks = interpret.summarise(program, k, v)
    q = torch.from_numpy(q_RD.astype(np.float32))[None]
    scene = ScoreContext(lengths=torch.tensor([len(k_MPD) * page]))
    got, _ = interpret.score(program, q, blocks, scene, pages=len(k_MPD))
    return got[0, 0].numpy()


def test_running_average_starts_as_the_block_mean() -> None:
    """Two query heads of qbar (1, -1) over three pages with means (1, 0), (0, 2) and (0, 0)."""
    program = trace(library.running_average(0.25), 2, 2, 2)
    assert program.state == (("r", 0.0),)
    k = torch.tensor([[[2.0, 0], [0, 0]], [[0, 1], [0, 3]], [[1, 0], [-1, 0]]])[:, None]
    blocks, q = interpret.summarise(program, k, k), torch.tensor([[[2.0, -2], [0, 0]]])
    scene, state = ScoreContext(lengths=torch.tensor([6])), {"r": torch.zeros(1, 1, 3)}
    for wanted in ([1, -2, 0], [1.25, -2.5, 0], [1.3125, -2.625, 0]):
        got, state = interpret.score(program, q, blocks, scene, state, pages=3)
        assert got[0, 0].tolist() == wanted
        assert state["r"][0, 0].tolist() == wanted


# In loops: random pages.


def softmax(x: Array) -> Array:
    grown = np.exp(x - x.max(0))
    return grown / grown.sum(0)


def logits(q: Array, landmark: Array) -> Array:
    """[landmarks, heads]"""
    return np.array([[sum(h * c) / np.sqrt(len(h)) for h in q] for c in landmark])


def means(k: Array, tokens: int) -> Array:
    """[pages, parts, D]"""
    parts = range(0, k.shape[1], tokens)
    return np.array([[page[i : i + tokens].mean(0) for i in parts] for page in k])


def four_bits(x: Array) -> Array:
    """Numbers as int4 holds them: a seventh of each vector's greatest is a step."""
    step = (np.abs(x).max(-1, keepdims=True) / 7).astype(np.float16).astype(np.float64)
    return np.clip(np.round(x / step), -7, 7) * step


def plain_quest(q: Array, k: Array, tokens: int) -> Array:
    bounds = []
    for page in k:
        boxes = [page[i : i + tokens] for i in range(0, len(page), tokens)]
        most = [max(sum(max(h[d] * box[:, d]) for d in range(len(h))) for box in boxes) for h in q]
        bounds.append(max(most))
    return np.array(bounds)


def plain_sub_means(q: Array, k: Array, tokens: int) -> Array:
    best = np.array([logits(q, parts).max(0) for parts in means(k, tokens)])
    return softmax(best).sum(1)


def plain_fine_means(q: Array, k: Array, tokens: int) -> Array:
    grown = [np.log(np.exp(logits(q, four_bits(parts))).sum(0)) for parts in means(k, tokens)]
    return softmax(np.array(grown)).sum(1)


def plain_oracle(q: Array, k: Array) -> Array:
    """True attention over all tokens of all pages, added up by page and over heads."""
    every = logits(q, k.reshape(-1, k.shape[2]))
    return softmax(every).reshape(len(k), -1, len(q)).sum((1, 2))


def plain_value_gated(q: Array, k: Array, v: Array) -> Array:
    return (k.mean(1) @ q.mean(0)) * np.sqrt((v**2).sum(2)).mean(1)


PLAIN: list[tuple[Flow, int, Callable[[Array, Array, Array], Array]]] = [
    (library.block_mean, 16, lambda q, k, v: k.mean(1) @ q.mean(0)),
    (library.softmax_max, 16, lambda q, k, v: softmax(logits(q, k.mean(1))).max(1)),
    (library.softmax_sum, 4, lambda q, k, v: softmax(logits(q, k.mean(1))).sum(1)),
    (library.quest, 16, lambda q, k, v: plain_quest(q, k, 16)),
    (library.sub_quest(16), 48, lambda q, k, v: plain_quest(q, k, 16)),
    (library.sub_quest(4), 16, lambda q, k, v: plain_quest(q, k, 4)),
    (library.sub_means(4), 16, lambda q, k, v: plain_sub_means(q, k, 4)),
    (library.fine_means(4), 16, lambda q, k, v: plain_fine_means(q, k, 4)),
    (library.fine_means(2), 4, lambda q, k, v: plain_fine_means(q, k, 2)),
    (library.value_gated, 16, plain_value_gated),
    (library.oracle, 16, lambda q, k, v: plain_oracle(q, k)),
]


def test_scores_in_plain_loops() -> None:
    for flow, page, plain in PLAIN:
        random = np.random.default_rng(0)
        q = 2 * random.normal(size=(GROUP, SIZE))
        k, v = random.normal(size=(2, 7, page, SIZE)).astype(np.float32).astype(np.float64)
        near = {"rtol": 1e-4, "atol": 1e-5, "err_msg": flow.name}
        np.testing.assert_allclose(scores(flow, q, k, v), plain(q, k, v), **near)


def test_names_and_bytes() -> None:
    """What a page costs for one KV head at P = 16, D = 128 with 16-bit keys (k and v: 8192)."""
    flows = {
        library.block_mean: ("block-mean", 256),
        library.softmax_max: ("softmax-max", 256),
        library.softmax_sum: ("softmax-sum", 256),
        library.quest: ("quest", 512),
        library.sub_quest(): ("sub-quest-16", 512),
        library.sub_means(): ("sub-means-4", 1024),
        library.fine_means(): ("fine-means-4", 256 + 8),
        library.value_gated: ("value-gated", 258),
        library.running_average(): ("running-average-0.5", 256),
        library.window: ("window", 0),
        library.oracle: ("oracle", 4096),
        library.dense: ("dense", 0),
    }
    for flow, wanted in flows.items():
        assert (flow.name, trace(flow, 16, 128, 2).bytes()) == wanted


# Through a rule and a cache.


CACHE = ops.PageCache(
    layers=3, kv_heads=2, page=4, pages=30, page_fields=ops.kv_fields(4, SIZE, torch.float32)
)


def chosen(lists: ops.PageLists | None, row: int, head: int) -> list[int]:
    assert lists is not None
    return lists.pages[row, head, : lists.counts[row, head]].tolist()


def test_the_window_keeps_first_and_most_recent_pages() -> None:
    rule = Rule(flow=library.window)
    assert rule.fields(page=4, head_size=SIZE, dtype=torch.float32) == ()
    lengths_B, q_BHD = torch.tensor([38, 40, 3]), torch.full((3, 4, SIZE), torch.nan)
    table_BM = torch.arange(30).reshape(3, 10)
    budgets_B = torch.tensor([18, 16, 12])
    lists = rule.select(CACHE, 2, q_BHD, table_BM, lengths_B, budgets_B)
    for head in range(2):
        assert chosen(lists, 0, head) == [0, 6, 7, 8, 9]  # 4 x 4 + 2 tokens
        assert chosen(lists, 1, head) == [0, 7, 8, 9]
        assert chosen(lists, 2, head) == [0]
    rule = Rule(flow=library.window, first=0, last=1)
    given = (q_BHD[:1], table_BM[:1], torch.tensor([40]), torch.tensor([12]))
    assert chosen(rule.select(CACHE, 2, *given), 0, 1) == [7, 8, 9]


def test_dense_gives_no_lists() -> None:
    rule = Rule(flow=library.dense)
    table_BM, q_BHD = torch.arange(30)[None], torch.zeros(1, 4, SIZE)
    for budget in (48, DENSE):
        given = (q_BHD, table_BM, torch.tensor([100]), torch.tensor([budget]))
        assert rule.select(CACHE, 2, *given) is None
    assert rule.scorer(2, 4) is None


# docs/flows.md.


def test_the_flow_of_the_tour_is_fine_means() -> None:
    """Up to how the scale is written: equal fields, equal operations."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    mine, ours = (trace(flow, 16, 64, 3) for flow in (names["mine"], library.fine_means(4)))
    assert mine.digest == ours.digest
    assert mine.bytes() == 136


def test_the_table_names_every_built_in_flow() -> None:
    table = TEXT[TEXT.index("| flow | score of a page") :]
    for name in loading.built_in():
        assert f"`{name}" in table, name
