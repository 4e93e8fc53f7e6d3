"""One layer's decode attention by its parts, dense beside sparse, against memory bandwidth.

    dense     attention over every page
    select    a flow scores the pages and lists those to keep
    attend    attention over those lists
    both      select, then attend: what sparse decoding costs a layer
    append    a flow writes one token a row; one row in `page` finishes its page
    finish    the same where every row finishes its page

On a GPU every case is a CUDA graph of many calls, and its time is a replay's by the number of them:
the gap between two calls counts, Python does not. No call should find in the L2 cache what an
earlier one has read, so calls take turns over layers, each with memory of its own, and where one
reads little, over tables or pages too. Keys and values are random, their pages shuffled; a flow
fills its fields itself. The cases of one shape take turns in every round; figures are medians over
rounds. On a CPU the same runs without graphs, for tests: its times mean little.

Bytes are what a case has to move: keys and values of the pages it attends to; all fields that the
flow has of every page of a row; of an append the token, and for each row that finishes its page the
page's other keys and its fields. Queries, tables, scores, lists and results do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.bench import timing
from sparrow.bench.timing import Case
from sparrow.engine.memory import device_memory
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import LayerBenchmark, LayerRow, StoredFlow
from sparrow.sparse.rule import Rule

COLD_BYTES = 256_000_000  # between two reads of one address: several times an L2 cache
LEAST_LAYERS, MOST_LAYERS = 4, 32
MOST_CALLS = 256  # in a graph
FILL_PAGES = 4096  # summarised at once
SPARE_BYTES = 8 << 30  # of a GPU, for lists, scratch and graphs

Flows = dict[str, Rule]
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of equal length, and how many pages each keeps."""

    batch: int = 32
    context: int = 32_768
    kept: int = 256


MAIN = Shape()
OTHERS = tuple(Shape(batch=16, context=k * 1024, kept=64) for k in (16, 24, 32))
SWEEP = tuple(Shape(batch=8, context=k * 1024, kept=64) for k in (4, 32, 128, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention of a layer, and where it runs."""

    kv_heads: int = 8
    group: int = 2  # query heads of a KV head
    size: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: torch.device

    def fields(self, flow: Rule | None = None) -> tuple[ops.Field, ...]:
        """Page fields of a flow; without one, keys and values."""
        if flow is None:
            return ops.kv_fields(self.page, self.size, self.dtype)
        return flow.fields(page=self.page, head_size=self.size, dtype=self.dtype)

    def page_bytes(self, flow: Rule | None = None) -> int:
        """Of those fields, all KV heads."""
        return ops.page_bytes(self.fields(flow), layers=1, kv_heads=self.kv_heads)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


def run(
    *,
    flows: Sequence[Rule] = (Rule(dense_layers=frozenset()),),
    device: str = "auto",
    shape: Shape = MAIN,
    others: Sequence[Shape] | None = None,
    sweep: Sequence[Shape] | None = None,
    head_size: int = 128,
    layers: int | None = None,
    replays: int = 20,
    rounds: int = 7,
    progress: Callable[[str], None] | None = None,
) -> LayerBenchmark:
    """Measure dense attention and every flow.

    flows    rules to measure, none with dense layers (default: block-mean)
    others   more shapes to measure in all parts (default: OTHERS on a GPU, none on a CPU)
    sweep    shapes of one batch whose selection alone is measured, with tables as wide as the
             longest needs (default: SWEEP on a GPU, none on a CPU)
    layers   memory to take turns over (default: as many as leave caches cold; on a CPU one)
    """
    heads = Heads(size=head_size, device=pick_device(device))
    on_gpu = heads.device.type == "cuda"
    others = (OTHERS if on_gpu else ()) if others is None else others
    sweep = (SWEEP if on_gpu else ()) if sweep is None else sweep
    _check([shape, *others, *sweep], heads.page)
    named = _named(flows)
    rows: list[dict[str, Any]] = []
    selection: list[dict[str, Any]] = []
    measure = partial(timing.measure, device=heads.device, replays=replays, rounds=rounds)
    tell = progress or (lambda _: None)
    with torch.inference_mode():
        for each in (shape, *others):
            tell(f"{each.batch} rows of {each.context} tokens")
            rows += measure(_parts(heads, each, named, layers))
            timing.free_memory(heads.device)
        if sweep:
            tell("selection by length")
            selection = measure(_selection(heads, sweep, named, layers))
    return LayerBenchmark(
        machine=timing.machine(heads.device),
        heads={name: getattr(heads, name) for name in ("kv_heads", "group", "size", "page")},
        dtype=str(heads.dtype).removeprefix("torch."),
        peak_bytes_per_s=timing.peak_of(heads.device),
        replays=replays,
        rounds=rounds,
        flows=tuple(_stored(heads, name, flow) for name, flow in named.items()),
        rows=tuple(LayerRow(**row) for row in rows),
        selection=tuple(LayerRow(**row) for row in selection),
    )


def _check(shapes: Sequence[Shape], page: int) -> None:
    for shape in shapes:
        if shape.context % page or not 0 < shape.kept <= shape.context // page:
            allowed = f"context in whole pages of {page} tokens, and 1 to all of them kept"
            raise ValueError(f"got {shape}, allowed: {allowed}")


def _named(flows: Sequence[Rule]) -> Flows:
    """Flows by name; of several of one name, the later ones get a number."""
    named: Flows = {}
    for flow in flows:
        count = sum(other.name == flow.name for other in named.values())
        named[f"{flow.name} ({count + 1})" if count else flow.name] = flow
    return named


def _stored(heads: Heads, name: str, flow: Rule) -> StoredFlow:
    own, kv = heads.page_bytes(flow), heads.page_bytes()
    return StoredFlow(flow=name, rule=repr(flow), page_bytes=own, kv_page_bytes=kv, of_kv=own / kv)


# Memory.


class FlowCache(ops.PageCache):
    """The fields of one flow, over keys and values that all flows share."""

    def __init__(self, kv: ops.PageCache, fields: Sequence[ops.Field], **sizes: Any) -> None:
        super().__init__(page_fields=fields, **sizes)
        self._kv = kv

    def field(self, name: str, layer: int) -> Tensor:
        return self._kv.field(name, layer) if name in ("k", "v") else super().field(name, layer)


class Bed:
    """Layers of random keys and values for rows of `width` pages, and the fields of every flow."""

    def __init__(self, heads: Heads, batch: int, width: int, flows: Flows, layers: int) -> None:
        torch.manual_seed(0)
        self.heads, self.width, self.layers, self.flows = heads, width, layers, flows
        sizes: Any = {"layers": layers, "kv_heads": heads.kv_heads, "device": heads.device}
        sizes |= {"page": heads.page, "pages": batch * width}
        self.kv = ops.PageCache(page_fields=heads.fields(), **sizes)
        for layer in range(layers):
            self.kv.field("k", layer).normal_()
            self.kv.field("v", layer).normal_()
        self.caches = {
            name: FlowCache(self.kv, heads.fields(flow), **sizes) for name, flow in flows.items()
        }
        self._summarise()
        self.q_BHD = heads.normal(batch, heads.kv_heads * heads.group, heads.size)
        self.k_BGD, self.v_BGD = (heads.normal(batch, heads.kv_heads, heads.size) for _ in range(2))

    def _summarise(self) -> None:
        slots = torch.arange(self.kv.pages * self.kv.page, device=self.heads.device)
        for name, flow in self.flows.items():
            for layer in range(self.layers):
                for chunk in slots.split(FILL_PAGES * self.kv.page):
                    flow.summarise(self.caches[name], layer, chunk)

    def table(self) -> Tensor:
        """Every page of the pool once, in an order of its own."""
        order = torch.randperm(self.kv.pages, device=self.heads.device)
        return order.int().view(-1, self.width)


@dataclass(frozen=True, slots=True)
class Layer:
    """Rows of a shape in one layer of a bed: what a call works on."""

    bed: Bed
    layer: int
    table_BM: Tensor
    length_B: Tensor
    budget_B: Tensor

    def attend(self, lists: ops.PageLists | None = None) -> Tensor:
        bed, k, v = self.bed, *(self.bed.kv.field(name, self.layer) for name in ("k", "v"))
        scale = bed.heads.size**-0.5
        return ops.attend_decode(bed.q_BHD, k, v, self.table_BM, self.length_B, lists, scale=scale)

    def select(self, flow: str) -> ops.PageLists:
        bed = self.bed
        lists = bed.flows[flow].select(
            bed.caches[flow], self.layer, bed.q_BHD, self.table_BM, self.length_B, self.budget_B
        )
        if lists is None:
            raise ValueError(f"flow {flow}: layer {self.layer} is dense; measure one without such")
        return lists

    def both(self, flow: str) -> Tensor:
        return self.attend(self.select(flow))

    def append(self, flow: str, slots_B: Tensor) -> None:
        bed = self.bed
        bed.flows[flow].append(bed.caches[flow], self.layer, bed.k_BGD, bed.v_BGD, slots_B)


def _layers(heads: Heads, pages: int, flows: Flows, least: int) -> int:
    """So many that the fields of every flow exceed the caches by far, if memory allows."""
    if heads.device.type != "cuda":
        return 1
    stored = [heads.page_bytes(flow) for flow in flows.values()]
    wanted = -(-COLD_BYTES // (pages * max(1, min(stored))))
    layer_bytes = pages * (heads.page_bytes() + sum(stored))
    room = (device_memory(heads.device) - SPARE_BYTES) // layer_bytes
    return max(1, min(max(least, wanted), MOST_LAYERS, room))


def _turns(bed: Bed, call_bytes: int) -> int:
    """How often to go through the layers until calls have moved enough."""
    wanted = min(MOST_CALLS, -(-COLD_BYTES // max(1, call_bytes)))
    return -(-wanted // bed.layers) if bed.heads.device.type == "cuda" else 1


# Cases.


def _case(bed: Bed, shape: Shape, flow: str | None, part: str, size: int, calls: Calls) -> Case:
    names = {"flow": flow, "part": part, **asdict(shape)}
    names |= {"table_pages": bed.width, "layers": bed.layers}
    return Case(names=names, bytes=size, calls=calls)


def _rows(bed: Bed, shape: Shape, tables: Sequence[Tensor]) -> list[Layer]:
    """Every layer with the first table, then with the next."""
    column_B = tables[0][:, 0]
    length_B = torch.full_like(column_B, shape.context, dtype=torch.int64)
    budget_B = torch.full_like(column_B, shape.kept * bed.heads.page)
    return [
        Layer(bed, layer, table_BM, length_B, budget_B)
        for table_BM in tables
        for layer in range(bed.layers)
    ]


def _parts(heads: Heads, shape: Shape, flows: Flows, layers: int | None) -> list[Case]:
    """One shape in all parts."""
    width = shape.context // heads.page
    layers = layers or _layers(heads, shape.batch * width, flows, LEAST_LAYERS)
    bed = Bed(heads, shape.batch, width, flows, layers)
    rows = _rows(bed, shape, [bed.table()])
    size = shape.batch * width * heads.page_bytes()
    cases = [_case(bed, shape, None, "dense", size, [row.attend for row in rows])]
    for flow in flows:
        cases += [*_reads(bed, shape, flow, rows), *_writes(bed, shape, flow, rows)]
    return cases


def _reads(bed: Bed, shape: Shape, flow: str, rows: Sequence[Layer]) -> list[Case]:
    lists = [row.select(flow) for row in rows]
    kept = sum(int(chosen.counts.sum()) for chosen in lists)  # over layers, rows and KV heads
    kv = kept * bed.heads.page_bytes() // (bed.heads.kv_heads * len(rows))
    fields = shape.batch * bed.width * bed.heads.page_bytes(bed.flows[flow])
    attend = [partial(row.attend, chosen) for row, chosen in zip(rows, lists, strict=True)]
    select = [partial(row.select, flow) for row in rows]
    both = [partial(row.both, flow) for row in rows]
    return [
        _case(bed, shape, flow, "select", fields, select),
        _case(bed, shape, flow, "attend", kv, attend),
        _case(bed, shape, flow, "both", fields + kv, both),
    ]


def _writes(bed: Bed, shape: Shape, flow: str, rows: Sequence[Layer]) -> list[Case]:
    """Appends to other pages at every turn; what they overwrite does not matter here."""
    page = bed.heads.page
    key = bed.heads.page_bytes() // (2 * page)  # one token's, all KV heads
    finishing = (page - 1) * key + bed.heads.page_bytes(bed.flows[flow])
    turns = min(bed.width, _turns(bed, finishing * shape.batch))
    spread_B = torch.arange(shape.batch, device=bed.heads.device) % page
    cases = []
    for part, offset_B in (("append", spread_B), ("finish", torch.full_like(spread_B, page - 1))):
        slots = [rows[0].table_BM[:, turn].long() * page + offset_B for turn in range(turns)]
        calls = [partial(row.append, flow, slots_B) for slots_B in slots for row in rows]
        size = shape.batch * 2 * key + int((offset_B == page - 1).sum()) * finishing
        cases.append(_case(bed, shape, flow, part, size, calls))
    return cases


def _selection(
    heads: Heads, sweep: Sequence[Shape], flows: Flows, layers: int | None
) -> list[Case]:
    """Selection alone, by length under tables of one width."""
    batch, width = sweep[0].batch, max(shape.context for shape in sweep) // heads.page
    bed = Bed(heads, batch, width, flows, layers or _layers(heads, batch * width, flows, 1))
    cases = []
    for flow in flows:
        for shape in sweep:
            size = batch * (shape.context // heads.page) * heads.page_bytes(flows[flow])
            rows = _rows(bed, shape, [bed.table() for _ in range(_turns(bed, size))])
            calls = [partial(row.select, flow) for row in rows]
            cases.append(_case(bed, shape, flow, "select", size, calls))
    return cases
