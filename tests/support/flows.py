"""Flows and caches to compare kernels with definitions on: the library, and odd ones that use
every operation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse import flows as lang
from sparrow.sparse.flows import Flow, interpret, library
from sparrow.sparse.flows.flow import Program, trace
from sparrow.sparse.flows.interpret import ScoreContext
from sparrow.sparse.rule import Rule

LAYERS, LAYER = 2, 1
KV_HEADS = 2

LIBRARY = [
    library.block_mean,
    library.softmax_max,
    library.softmax_sum,
    library.quest,
    library.sub_quest(4),
    library.sub_means(4),
    library.fine_means(4),
    library.fine_means(2),
    library.spread_means(4),
    library.value_gated,
    library.running_average(0.5),
    library.window,
    library.oracle,
]


def means(keys, values):
    return {"mean": keys.mean(0), "spread": (keys - keys.mean(0)).norm(1).mean()}


def arithmetic(query, fields, position):
    x = query * fields.mean - 0.25
    y = lang.where(x > 0, x.silu(), -x.abs() / 3) + lang.maximum(x, 0.5) * lang.minimum(x, 0.25)
    return y.sigmoid().sum() + (fields.spread + 1).log() + (-fields.spread).exp().sqrt()


def distance(query, fields, position):
    gone = position.length - 16 * position.page
    near = lang.where(gone < 64, 1.0, 0.0) + lang.mask(position.page <= position.pages).relu()
    return (query.mean(0) @ fields.mean + near) / (1 + gone) + fields.spread


def parts(keys, values):
    halves = keys.reshape(2, keys.shape[0] // 2, keys.shape[1])
    return {"low": halves.min(1), "first": keys[0], "few": lang.take(values.mean(0), [0, 2])}


def pieces(query, fields, position):
    best = (fields.low @ query.T).max(1)
    pair = lang.kron(fields.few, lang.full(1.0, 2)).sum()
    return best.sum() + pair + fields.first @ query[0] + fields.low[1:2].sum()


def over_pages(query, fields, position):
    x = query @ fields.mean
    y = (x - lang.mean_over_pages(x)) / (1 + lang.norm_over_pages(x, among="free"))
    z = lang.normalise_over_pages(x) + lang.softmax_over_pages(x, among="free")
    return (y + z * (lang.max_over_pages(x) - lang.min_over_pages(x))).max() + fields.spread


def smoothed(query, fields, position):
    return lang.convolve_over_pages(query @ fields.mean, (0.25, 1.0, 0.5)).max() + fields.spread


def unions(query, fields, position):
    """A choice among all finished pages by what is known after a pass, within one by the page."""
    x = query @ fields.mean
    near = lang.two_stage(fields.spread, lang.softmax_over_pages(x).max(), 1.5)
    return lang.union(lang.union(x[0], near, 0.25), x.sum(), 0.5)


def learned(query, fields, position):
    rng = np.random.default_rng(0)
    bent = query @ lang.weights(rng.normal(size=(LAYERS, KV_HEADS, query.shape[1], 8)))
    mixed = (bent @ lang.constant(rng.normal(size=(8, 4)))).sum()
    return mixed + fields.mean @ query[0] + fields.spread


def eighths(keys, values):
    return {"a": keys.reshape(4, 4, keys.shape[1]).max(1), "b": values.mean(0)}


def coarse(query, fields, position):
    return lang.logsumexp(query @ fields.a.T / 4, axis=1).max() + (fields.b @ query.T).sum()


def far_below(query, fields, position):
    """Numbers that have no digits, divisors without a reciprocal, names that kernels might want."""
    x = lang.where(position.page < 1, float("-inf"), fields.m_scale)
    sign = lang.maximum(lang.minimum(fields.m.sum() / 1e-39, 1.0), -1.0)
    y = lang.minimum(sign, float("inf")) + fields.m @ query[0]
    return x + y + fields.pages + fields.at, {"pages": fields.pages + 1, "at": fields.at * 0.5}


def named(keys, values):
    return {"m": keys.mean(0), "m_scale": keys.norm(1).mean()}


def mean_flow(name: str, score: Callable[..., Any], *, field: str = "mean", **more: Any) -> Flow:
    """A flow over the mean key of a page."""
    summarise = lambda keys, values: {field: keys.mean(0)}  # noqa: E731
    fields = {field: lang.as_keys(lang.D)}
    return Flow(name=name, fields=fields, summarise=summarise, score=score, **more)


def quarters(name: str, form: Callable[..., Any]) -> Flow:
    """A flow over four parts of a page, stored in a format."""
    fields = {"a": form(lang.P // 4, lang.D), "b": form(lang.D)}
    return Flow(name=name, fields=fields, summarise=eighths, score=coarse)


IN_FP8 = Flow(
    name="fp8-quarters",
    fields={"means": lang.fp8(lang.P // 4, lang.D)},
    summarise=lambda k, v: {"means": k.reshape(k.shape[0] // 4, 4, k.shape[1]).mean(1)},
    score=lambda query, fields, position: (query @ fields.means.T).max(),
)


def count(query, fields, position):
    return fields.seen * query.mean(), {"seen": fields.seen + position.page}


COUNTING = Flow(name="counting", state={"seen": 1.0}, score=count)
SIDE = {"mean": lang.as_keys(lang.D), "spread": lang.fp32()}
PARTS = {"low": lang.fp16(2, lang.D), "first": lang.as_keys(lang.D), "few": lang.fp32(2)}
ODD = [
    *(
        Flow(name=score.__name__, fields=SIDE, summarise=means, score=score)
        for score in (arithmetic, distance, over_pages, smoothed, unions, learned)
    ),
    Flow(name="pieces", fields=PARTS, summarise=parts, score=pieces),
    quarters("int4", lang.int4),
    Flow(
        name="far-below",
        fields={"m": lang.int4(lang.D), "m_scale": lang.fp32()},
        state={"pages": 1.0, "at": 0.0},
        summarise=named,
        score=far_below,
    ),
    mean_flow("half-mass", lambda q, f, p: lang.softmax_over_pages(q @ f.mean).sum(), mass=0.5),
]
# What Triton's interpreter does not do as a GPU does: bf16 and fp8.
ON_GPU = [quarters("fp8", lang.fp8), quarters("bf16", lang.bf16)]


class Bed(NamedTuple):
    """Two caches with the same keys and values, and rows over them."""

    rule: Rule
    program: Program
    defined: ops.PageCache
    compiled: ops.PageCache
    q_BHD: Tensor
    table_BM: Tensor
    lengths_B: Tensor
    rows_B: Tensor

    @property
    def slots_T(self) -> Tensor:
        """Those of all tokens."""
        page = self.program.page
        parts = []
        for table_M, length in zip(self.table_BM, self.lengths_B.tolist(), strict=True):
            t = torch.arange(length, device=table_M.device)
            parts.append(table_M.long()[t // page] * page + t % page)
        return torch.cat(parts)

    def scores(self, budgets: Tensor | None = None) -> Tensor:
        """By definition; the state of the cache moves on."""
        scene = ScoreContext(lengths=self.lengths_B, budgets=budgets, layer=LAYER)
        given = (self.q_BHD, self.table_BM, scene, self.rows_B)
        return interpret.score_cache(self.program, self.defined, *given)


def make_cache(
    rule: Rule,
    page: int,
    size: int,
    pages: int,
    dtype: torch.dtype,
    *,
    layers: int = LAYERS,
    kv_heads: int = KV_HEADS,
    slots: int = 0,
    width: int = 0,
    device: str = "cpu",
) -> ops.PageCache:
    """Keys, values and what the rule keeps of a page and (`width` pages a slot) of a sequence."""
    fields = rule.fields(page=page, head_size=size, dtype=dtype)
    return ops.PageCache(
        layers=layers,
        kv_heads=kv_heads,
        page=page,
        pages=pages,
        page_fields=(*ops.kv_fields(page, size, dtype), *fields),
        slots=slots,
        state_fields=rule.states(width) if slots else (),
        device=device,
    )


def make_bed(
    flow: Flow,
    lengths: list[int],
    *,
    group: int = 2,
    size: int = 32,
    page: int = 16,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    whole: bool = False,
) -> Bed:
    """Random keys, or whole numbers (`whole`) so that scores tie and sums are exact."""
    rule = Rule(flow=flow)
    width = max(-(-length // page) for length in lengths) + 1
    count = len(lengths) * width + 3
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    k, v = (numbers(count, KV_HEADS, page, size) for _ in range(2))
    caches = []
    for _ in range(2):
        sizes = {"slots": len(lengths), "width": width}
        cache = make_cache(rule, page, size, count, dtype, **sizes, device=device)
        cache.field("k", LAYER).copy_(k)
        cache.field("v", LAYER).copy_(v)
        for row in range(len(lengths)):
            cache.begin(row)
        caches.append(cache)
    order = torch.randperm(count, generator=generator)[: len(lengths) * width]
    return Bed(
        rule=rule,
        program=trace(flow, page, size, group),
        defined=caches[0],
        compiled=caches[1],
        q_BHD=numbers(len(lengths), KV_HEADS * group, size).to(device),
        table_BM=order.view(len(lengths), width).int().to(device),
        lengths_B=torch.tensor(lengths, device=device),
        rows_B=torch.arange(len(lengths), device=device),
    )


def same_fields(bed: Bed, tolerance: float) -> None:
    """What kernels stored is what the definition stored, packed numbers but for rare roundings."""
    sizes = {"page": bed.program.page, "head_size": bed.program.head_size}
    for field in bed.rule.fields(**sizes, dtype=bed.q_BHD.dtype):
        left, right = (c.field(field.name, LAYER) for c in (bed.defined, bed.compiled))
        if field.dtype.itemsize == 1:
            left, right = left.view(torch.uint8), right.view(torch.uint8)
            assert (left != right).float().mean() < 0.002, field.name
        else:
            torch.testing.assert_close(right.float(), left.float(), rtol=tolerance, atol=tolerance)


def same_choice(score_BGM: Tensor, wanted: ops.PageLists, found: ops.PageLists) -> None:
    """Equal lists, or pages whose scores differ by rounding only."""
    assert torch.equal(wanted.counts, found.counts)
    for row, head in np.ndindex(*wanted.counts.shape):
        count = int(wanted.counts[row, head])
        left, right = (set(x.pages[row, head, :count].tolist()) for x in (wanted, found))
        assert found.pages[row, head, :count].tolist() == sorted(right)
        assert (found.pages[row, head, count:] == -1).all()
        if left != right:
            score_M = score_BGM[row, head]
            spread = score_M[score_M.isfinite()].abs().max().item()
            lost, got = (score_M[sorted(x)] for x in (left - right, right - left))
            pair = (part.sort().values for part in (lost, got))
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5 * spread)
