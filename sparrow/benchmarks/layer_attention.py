"""Layer benchmark: decode attention of one layer by part, dense and sparse, against bandwidth.

    dense     attention over every page
    select    a flow scores the pages and lists the kept ones; the mean over layers, where one
              choice serves several
    attend    attention over those lists
    both      select, then attend: the cost of sparse decoding per layer
    append    a flow writes one token per row; one row in `page` finishes its page
    finish    the same where every row finishes its page
    read      on a CPU: a plain sum over keys and values, for comparison

On a GPU every case is a CUDA graph of many calls, and the time of a call is that of a replay over
their number: gaps between calls count, Python does not. To keep the L2 cache cold, calls cycle over
layers with separate memory and, where a call reads little, over tables or pages too. Keys and
values are random, their pages shuffled; a flow fills its own fields. The cases of one shape
alternate in every round; figures are medians over rounds. On a CPU the same runs without graphs,
over a pool larger than the last-level cache.

Bytes are those that a case must move: keys and values of the attended pages; all fields of the flow
of every page of a row; for an append the token, and for each row that finishes its page the page's
other keys and its fields. Queries, tables, scores, lists and results do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.benchmarks import timing
from sparrow.benchmarks.timing import TimedCase
from sparrow.engine.memory import device_memory
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import LayerBenchmark, LayerRow, StoredFlow
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule

COLD_BYTES = 256_000_000  # between two reads of an address: several times the L2 cache
LEAST_LAYERS, MOST_LAYERS = 4, 32
MOST_CALLS = 256  # in a graph
FILL_PAGES = 4096  # summarised at once
SPARE_BYTES = 8 << 30  # of a GPU, for lists, scratch and graphs

Flows = dict[str, Rule]
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of equal length, and the number of pages that a row keeps."""

    batch: int = 32
    context: int = 32_768
    kept: int = 256


MAIN = Shape()
CPU = Shape(batch=16, context=4096, kept=64)
OTHERS = tuple(Shape(batch=16, context=k * 1024, kept=64) for k in (16, 24, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a layer, and its device."""

    kv_heads: int = 8
    group: int = 2  # query heads of a KV head
    size: int = 128
    page: int = 16
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def fields(self, flow: Rule | None = None) -> tuple[ops.Field, ...]:
        """Page fields of a flow; without a flow, keys and values."""
        if flow is None:
            return ops.kv_fields(self.page, self.size, self.dtype)
        return flow.fields(page=self.page, head_size=self.size, dtype=self.dtype)

    def page_bytes(self, flow: Rule | None = None) -> int:
        """Bytes of these fields over all KV heads."""
        return ops.page_bytes(self.fields(flow), layers=1, kv_heads=self.kv_heads)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


def run(
    *,
    flows: Sequence[Rule] = (Rule(dense_layers=frozenset()),),
    device: str = "auto",
    shape: Shape | None = None,
    others: Sequence[Shape] | None = None,
    head_size: int = 128,
    layers: int | None = None,
    replays: int | None = None,
    rounds: int = 7,
    progress: Callable[[str], None] | None = None,
) -> LayerBenchmark:
    """Measure dense attention and every flow.

    flows    rules to measure, none with dense layers (default: block-mean)
    shape    what to measure (default: MAIN on a GPU, CPU on a CPU)
    others   more shapes to measure in all parts (default: OTHERS on a GPU, none on a CPU)
    replays  of all calls in a round (default: 20 on a GPU, one on a CPU)
    layers   separate memories to cycle over (default: enough for cold caches; on a CPU one)
    """
    heads = Heads(size=head_size, device=pick_device(device))
    on_gpu = heads.device.type == "cuda"
    others = (OTHERS if on_gpu else ()) if others is None else others
    shapes = [shape or (MAIN if on_gpu else CPU), *others]
    replays = replays or (20 if on_gpu else 1)
    for case in shapes:
        if case.context % heads.page or not 0 < case.kept <= case.context // heads.page:
            raise ValueError(f"expected whole pages of {heads.page} and 1 to all kept, got {case}")
    named = _named(flows)
    rows: list[dict[str, Any]] = []
    measure = partial(timing.measure, device=heads.device, replays=replays, rounds=rounds)
    report = progress or (lambda _: None)
    with torch.inference_mode():
        for case in shapes:
            report(f"{case.batch} rows of {case.context} tokens")
            count = layers or _layers(heads, case.batch * case.context // heads.page, named)
            rows += _with_ratios(measure(LayerStack(heads, case, named, count).cases()))
            timing.free_memory(heads.device)
    return LayerBenchmark(
        machine=timing.machine(heads.device),
        heads={name: getattr(heads, name) for name in ("kv_heads", "group", "size", "page")},
        dtype=str(heads.dtype).removeprefix("torch."),
        peak_bytes_per_s=timing.peak_bandwidth(heads.device),
        replays=replays,
        rounds=rounds,
        flows=tuple(_stored(heads, name, flow) for name, flow in named.items()),
        rows=tuple(LayerRow(**row) for row in rows),
    )


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = next((row["tb_per_s"] for row in rows if row["part"] == "read"), None)
    return [row | {"of_read": row["tb_per_s"] / plain if plain else None} for row in rows]


def _named(flows: Sequence[Rule]) -> Flows:
    """Flows by name; flows of the same name are numbered."""
    named: Flows = {}
    for flow in flows:
        count = sum(other.name == flow.name for other in named.values())
        named[f"{flow.name} ({count + 1})" if count else flow.name] = flow
    return named


def _stored(heads: Heads, name: str, flow: Rule) -> StoredFlow:
    size, kv = heads.page_bytes(flow), heads.page_bytes()
    sizes = {"page_bytes": size, "kv_page_bytes": kv}
    return StoredFlow(flow=name, rule=repr(flow), of_kv=size / kv, **sizes)


class FlowCache(ops.PageCache):
    """A page cache with the fields of one flow; keys and values are shared by all flows."""

    def __init__(self, kv: ops.PageCache, fields: Sequence[ops.Field], **sizes: Any) -> None:
        super().__init__(page_fields=fields, **sizes)
        self._kv = kv

    def field(self, name: str, layer: int) -> Tensor:
        return self._kv.field(name, layer) if name in ("k", "v") else super().field(name, layer)


class LayerStack:
    """Layers of random keys and values for the rows of a shape, and the fields of every flow."""

    def __init__(self, heads: Heads, shape: Shape, flows: Flows, layers: int) -> None:
        torch.manual_seed(0)
        self.heads, self.shape, self.flows, self.layers = heads, shape, flows, layers
        width, batch, device = shape.context // heads.page, shape.batch, heads.device
        sizes: Any = {"layers": layers, "kv_heads": heads.kv_heads, "device": device}
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
        # Every page of the pool once, shuffled.
        self.table_BM = torch.randperm(self.kv.pages, device=device).int().view(batch, width)
        self.length_B = torch.full((batch,), shape.context, device=device)
        self.budget_B = torch.full_like(self.table_BM[:, 0], shape.kept * heads.page)

    def _summarise(self) -> None:
        slots = torch.arange(self.kv.pages * self.kv.page, device=self.heads.device)
        for name, flow in self.flows.items():
            for layer in range(self.layers):
                for chunk in slots.split(FILL_PAGES * self.kv.page):
                    flow.summarise(self.caches[name], layer, chunk)

    def read(self, layer: int) -> list[Tensor]:
        return [self.kv.field(name, layer).sum() for name in ("k", "v")]

    def attend(self, layer: int, lists: ops.PageLists | None = None) -> Tensor:
        k, v = (self.kv.field(name, layer) for name in ("k", "v"))
        rows = self.q_BHD, k, v, self.table_BM, self.length_B
        return ops.attend_decode(*rows, lists, scale=self.heads.size**-0.5)

    def select(self, layer: int, flow: str) -> ops.PageLists | None:
        """None in a layer that uses the choice of one before it."""
        if self.flows[flow].chooser(layer) != layer:
            return None
        rows = self.q_BHD, self.table_BM, self.length_B, self.budget_B
        lists = self.flows[flow].select(self.caches[flow], layer, *rows)
        if lists is None:
            raise ValueError(f"flow {flow}: expected no dense layers, got layer {layer}")
        return lists

    def both(self, layer: int, flow: str, chosen: ops.PageLists) -> Tensor:
        """chosen: what a layer attends to that does not choose."""
        return self.attend(layer, self.select(layer, flow) or chosen)

    def append(self, layer: int, flow: str, slots_B: Tensor) -> None:
        self.flows[flow].append(self.caches[flow], layer, self.k_BGD, self.v_BGD, slots_B)

    # Cases.

    def cases(self) -> list[TimedCase]:
        """The cases of the shape: all parts."""
        size, layers = self.kv.pages * self.heads.page_bytes(), range(self.layers)
        cases = [self._case(None, "dense", size, [partial(self.attend, n) for n in layers])]
        if self.heads.device.type == "cpu":
            cases.append(self._case(None, "read", size, [partial(self.read, n) for n in layers]))
        for flow in self.flows:
            cases += [*self._reads(flow), *self._writes(flow)]
        return cases

    def _case(self, flow: str | None, part: str, size: int, calls: Calls) -> TimedCase:
        names = {"flow": flow, "part": part, **asdict(self.shape), "layers": self.layers}
        return TimedCase(names=names, bytes=size, calls=calls)

    def _reads(self, flow: str) -> list[TimedCase]:
        layers, heads = range(self.layers), self.heads
        lists: list[ops.PageLists] = []
        for layer in layers:
            lists.append(self.select(layer, flow) or lists[-1])
        kept = sum(int(chosen.counts.sum()) for chosen in lists)  # over layers, rows and KV heads
        kv = kept * heads.page_bytes() // (heads.kv_heads * self.layers)
        fields = self.kv.pages * heads.page_bytes(self.flows[flow]) // self.flows[flow].flow.layers
        attend = [partial(self.attend, layer, lists[layer]) for layer in layers]
        return [
            self._case(flow, "select", fields, [partial(self.select, n, flow) for n in layers]),
            self._case(flow, "attend", kv, attend),
            self._case(
                flow, "both", fields + kv, [partial(self.both, n, flow, lists[n]) for n in layers]
            ),
        ]

    def _writes(self, flow: str) -> list[TimedCase]:
        """Appends, to other pages at every call; what they overwrite does not matter."""
        page, batch = self.heads.page, self.shape.batch
        key = self.heads.page_bytes() // (2 * page)  # one token's, all KV heads
        finishing = (page - 1) * key + self.heads.page_bytes(self.flows[flow])
        calls_needed = min(MOST_CALLS, -(-COLD_BYTES // (finishing * batch)))
        turns = -(-calls_needed // self.layers) if self.heads.device.type == "cuda" else 1
        columns = self.table_BM.long().T[:turns]
        spread_B = torch.arange(batch, device=self.heads.device) % page
        cases, offsets = [], {"append": spread_B, "finish": torch.full_like(spread_B, page - 1)}
        for part, offset_B in offsets.items():
            calls = [
                partial(self.append, layer, flow, column_B * page + offset_B)
                for column_B in columns
                for layer in range(self.layers)
            ]
            size = batch * 2 * key + int((offset_B == page - 1).sum()) * finishing
            cases.append(self._case(flow, part, size, calls))
        return cases


def _layers(heads: Heads, pages: int, flows: Flows) -> int:
    """The number of layers whose fields exceed the caches by far, if memory allows."""
    if heads.device.type != "cuda":
        return max(flow.flow.layers for flow in flows.values())
    stored = [heads.page_bytes(flow) for flow in flows.values()]
    needed = -(-COLD_BYTES // (pages * max(1, min(stored))))
    layer_bytes = pages * (heads.page_bytes() + sum(stored))
    room = (device_memory(heads.device) - SPARE_BYTES) // layer_bytes
    return max(1, min(max(LEAST_LAYERS, needed), MOST_LAYERS, room))


# For flow campaigns.


def make_timer(device: str) -> Callable[[dict[str, Any]], dict[str, float]]:
    """Answers {"flow": file or name} with the microseconds of a layer: choice and attention.

    With "compile" it only makes the kernels, which may go on beside other work. The target of a
    worker process (sparrow/processes). Of `MAIN`, on a CPU of a small shape.
    """
    heads = Heads(device=pick_device(device))
    shape = MAIN if heads.device.type == "cuda" else Shape(batch=1, context=1024, kept=16)

    @torch.inference_mode()
    def answer(question: dict[str, Any]) -> dict[str, float]:
        flow = {"flow": Rule(flow=load_flow(question["flow"]), dense_layers=frozenset())}
        if question.get("compile"):
            LayerStack(heads, shape, flow, flow["flow"].flow.layers).cases()
            return {}
        layers = _layers(heads, shape.batch * shape.context // heads.page, flow)
        cases = LayerStack(heads, shape, flow, layers).cases()
        both = [case for case in cases if case.names["part"] == "both"]
        (row,) = timing.measure(both, heads.device, replays=5, rounds=5)
        return {"microseconds": row["us"]}

    return answer
