"""A flow: what to keep with a finished page, and how to score pages for a query.

    def summarise(keys, values):                 # one page: [P, D] each
        return {"mean": keys.mean(0)}

    def score(query, fields, position):          # query heads of a group [R, D]; one page's fields
        return query.mean(0) @ fields.mean

    block_mean = Flow(name="block-mean", fields={"mean": bf16(D)}, summarise=summarise, score=score)

A flow is checked when it is made: its functions run once on traced tensors, and every mistake names
its line. `trace` gives the program of a flow for the sizes of a model.
"""

import hashlib
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch

from sparrow import ops
from sparrow.sparse.flows.formats import Format, PageField
from sparrow.sparse.flows.tensor import (
    CodeLine,
    FlowError,
    Node,
    Tensor,
    author_line,
    did_you_mean,
    fail,
    in_order,
    is_author_frame,
)

PROBE = (16, 128, 2)  # page, head size, query heads a group: what a new flow is traced for
MOST_STORED = 8  # times the bytes of a page's keys and values

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A selection formula as plain functions; `Rule` joins it with budgets and reserved pages.

    fields     what is kept with every finished page, by name: bf16(D), int4(P // 4, D), ...
    summarise  (keys, values) -> {name: tensor}; both are [P, D], rotated, one KV head
    score      (query, fields, position) -> one number per page; with state also {name: tensor}.
               None: every page is kept. position has .length (tokens, the current one included),
               .page (number of the page) and .pages (finished pages of the sequence)
    state      one number per page and request that lives across steps: its value at first. `fields`
               has it as well, and `score` returns (score, {name: new value})
    mass       keep the best pages until they hold this share of all scores (which are then masses);
               the budget is what they may take at most
    layers     so many sparse layers in a row use one choice, that of the first of them
    probe      page, head size and query heads a group that it is traced for when it is made; to be
               given where a flow fits one kind of model only, as by constants of its sizes
    """

    name: str
    score: Function | None
    summarise: Function | None = None
    fields: Mapping[str, Format] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    mass: float | None = None
    layers: int = 1
    probe: tuple[int, int, int] = PROBE
    place: CodeLine = field(init=False, repr=False)  # where it was made

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", author_line())
        allowed = {
            "name": (self.name and isinstance(self.name, str), "a text"),
            "fields": (isinstance(self.fields, Mapping), "a mapping by name"),
            "state": (_are_numbers(self.state), "a mapping from names to the numbers at first"),
            "mass": (_is_share(self.mass), "above 0, at most 1"),
            "layers": (
                type(self.layers) is int and self.layers > 0,
                "a number of layers, 1 or more",
            ),
            "probe": (_are_sizes(self.probe), "page, head size, query heads"),
        }
        for name, (right, expected) in allowed.items():
            if not right:
                raise fail(f"Flow.{name}: expected {expected}, got {getattr(self, name)!r}")
        for name in ("fields", "state"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        trace(self, *self.probe)

    @property
    def digest(self) -> str:
        """A name for the formula, by which schedules tell whether they were made for it."""
        return trace(self, *self.probe).digest


def _are_numbers(state: Any) -> bool:
    return isinstance(state, Mapping) and all(
        isinstance(start, int | float) and math.isfinite(start) for start in state.values()
    )


def _is_share(mass: Any) -> bool:
    number = isinstance(mass, int | float) and not isinstance(mass, bool)
    return mass is None or (number and 0 < mass <= 1)


def _are_sizes(probe: Any) -> bool:
    right = isinstance(probe, tuple) and len(probe) == 3
    return right and all(isinstance(size, int) and size > 0 for size in probe)


# Programs.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A flow for one page size, head size and group: operations with known shapes.

    `summary` has a node for each field, `updates` one for each state. The digest names the content:
    equal programs have equal ones, whatever their flow is called. A program that was traced without
    a group (0) has no score: it says what is kept with pages.
    """

    name: str
    page: int
    head_size: int
    group: int
    fields: tuple[PageField, ...]
    summary: tuple[Node, ...]
    score: Node | None
    state: tuple[tuple[str, float], ...]
    updates: tuple[Node, ...]
    mass: float | None
    layers: int = 1

    @property
    def digest(self) -> str:
        return _digest(self)

    def blocks(self, keys: torch.dtype) -> dict[str, ops.Field]:
        """What the fields of one page take for one KV head, by name; `keys`: their dtype."""
        return {block.name: block for item in self.fields for block in item.storage(keys)}

    def bytes(self, keys: torch.dtype = torch.bfloat16) -> int:
        """What the fields of one page take for one KV head."""
        return sum(item.bytes(keys) for item in self.fields)

    @property
    def read_of_mean(self) -> float:
        """Bytes that a step reads of a page, over those of a 16-bit mean key; mean over layers."""
        return self.bytes() / (2 * self.head_size * self.layers)

    @property
    def budgeted(self) -> bool:
        """Whether scores depend on how many pages may be kept."""
        return any(node.op == "best" for node in self.nodes)

    @property
    def nodes(self) -> list[Node]:
        """Of the score and the updates, inputs first."""
        return list(in_order([self.score, *self.updates] if self.score is not None else []))


@cache
def trace(flow: Flow, page: int, head_size: int, group: int | None) -> Program:
    """The program of a flow for these sizes; FlowError with the author's line otherwise."""
    sizes = {"P": page, "D": head_size}
    fields = tuple(_field(flow, name, form, sizes) for name, form in flow.fields.items())
    _check_size(flow, fields, page, head_size)
    summary = _trace_summary(flow, fields, page, head_size)
    score, updates = _trace_score(flow, fields, group, head_size) if group else (None, ())
    state = tuple((name, float(value)) for name, value in flow.state.items()) if group else ()
    return Program(
        name=flow.name,
        page=page,
        head_size=head_size,
        group=group or 0,
        fields=fields,
        summary=summary,
        score=score,
        state=state,
        updates=updates,
        mass=flow.mass,
        layers=flow.layers,
    )


def _field(flow: Flow, name: str, form: object, sizes: dict[str, int]) -> PageField:
    _check_name(flow, "field", name)
    what = f"flow {flow.name!r}, field {name!r}"
    if not isinstance(form, Format):
        raise fail(f"{what}: expected a format such as bf16(D), got {form!r}", flow.place)
    try:
        item = PageField(name=name, form=form, shape=form.resolve(sizes))
        item.storage(torch.bfloat16)
    except FlowError as error:
        raise fail(f"{what}: {error}", flow.place) from None
    return item


def _check_name(flow: Flow, kind: str, name: object) -> None:
    right = isinstance(name, str) and name.isidentifier() and name[0] != "_"
    if not right or name in ("k", "v") or (kind == "state" and name in flow.fields):
        allowed = "starts with a letter, is not k or v (the page's keys and values) and not taken"
        raise fail(f"flow {flow.name!r}: a {kind} called {name!r}: a name {allowed}", flow.place)


def _check_size(flow: Flow, fields: tuple[PageField, ...], page: int, head_size: int) -> None:
    """Refuse fields that are large beside the keys and values of a page."""
    stored = sum(item.bytes(torch.bfloat16) for item in fields)
    whole = 2 * page * head_size * torch.bfloat16.itemsize
    if stored > MOST_STORED * whole:
        raise fail(f"fields take {stored} bytes a page, its keys and values {whole}", flow.place)


# Summaries.


def _trace_summary(
    flow: Flow, fields: tuple[PageField, ...], page: int, head_size: int
) -> tuple[Node, ...]:
    if flow.summarise is None:
        if fields:
            problem = f"nothing writes its fields ({', '.join(flow.fields)}); give summarise="
            raise fail(f"flow {flow.name!r}: {problem}", flow.place)
        return ()
    inputs = [_input(name, (page, head_size)) for name in ("keys", "values")]
    written = _run(flow, flow.summarise, *inputs)
    start = _start(flow, flow.summarise)
    if not isinstance(written, dict):
        raise fail(f"summarise returns {{field: tensor}}, got {_kind(written)}", start)
    _check_returned("field", "summarise", written, [field.name for field in fields], start)
    nodes = tuple(
        _numbers(f"field {field.name!r}", written[field.name], field.shape, start)
        for field in fields
    )
    _check_inputs("summarise", nodes, inputs)
    return nodes


def _numbers(what: str, value: Any, shape: tuple[int, ...], start: CodeLine) -> Node:
    """The node of a tensor that an author returned: numbers, of the shape that is wanted."""
    if not isinstance(value, Tensor):
        forgot = "; does it end with return?" if value is None else ""
        raise fail(f"{what} is a tensor, got {_kind(value)}{forgot}", start)
    node = value.node
    if node.boolean:
        hint = "turn it into numbers with where(condition, a, b)"
        raise fail(f"{what} is a condition: {hint}", node.place)
    if node.shape != shape:
        expected = f"has shape {shape}" if shape else "is one number per page"
        hint = "" if shape else ": reduce it (.sum(), .max(), .mean())"
        raise fail(f"{what} {expected}, got shape {node.shape}{hint}", node.place)
    return node


def _check_returned(
    kind: str, function: str, returned: Iterable[str], declared: Iterable[str], start: CodeLine
) -> None:
    """Check that a function returns exactly the names that the flow declares."""
    for name in returned:
        if name not in declared:
            hint = did_you_mean(name, declared) or f"; declare it{_there(declared)}"
            raise fail(f"{function} returns {name!r}, which is no declared {kind}{hint}", start)
    for name in declared:
        if name not in returned:
            raise fail(f"{kind} {name!r} is declared, but {function} does not return it", start)


# Scores.


class Fields:
    """The fields of a page, and the state, as attributes or items."""

    def __init__(self, values: dict[str, Tensor], read: set[str]) -> None:
        self._values, self._read = values, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            hint = did_you_mean(name, self._values) + _there(self._values)
            raise fail(f"there is no field {name!r}{hint}")
        self._read.add(name)
        return self._values[name]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class Position:
    """Position of a query: `length` and `pages` of the sequence; `page` is each page's number."""

    def __init__(self) -> None:
        self.length, self.pages = _input("length", ()), _input("pages", ())
        self.page = _input("page", (), paged=True)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise fail(f"position has .length, .pages and .page, not .{name}")


def _trace_score(
    flow: Flow, fields: tuple[PageField, ...], group: int, head_size: int
) -> tuple[Node | None, tuple[Node, ...]]:
    if flow.score is None:
        if fields or flow.state:
            problem = "fields or state, but no score that reads them"
            raise fail(f"flow {flow.name!r} has {problem}", flow.place)
        return None, ()
    values = {field.name: _input("field", field.shape, field.name, paged=True) for field in fields}
    for name in flow.state:
        _check_name(flow, "state", name)
        values[name] = _input("state", (), name, paged=True)
    read: set[str] = set()
    query, position = _input("query", (group, head_size)), Position()
    result = _run(flow, flow.score, query, Fields(values, read), position)
    start = _start(flow, flow.score)
    score, updates = _split(flow, result, start)
    unread = [name for name in values if name not in read]
    if unread:
        raise fail(f"score never reads {unread[0]!r}: it would take memory for nothing", start)
    nodes = [_of_pages("score", score, start)]
    nodes += [_of_pages(f"state {name!r}", updates[name], start) for name in flow.state]
    inputs = [query, *values.values(), position.length, position.pages, position.page]
    _check_inputs("score", nodes, inputs)
    if flow.mass is not None:
        for node in in_order(nodes):
            if node.op == "best":
                raise fail("among_best needs a number of pages, not mass", node.place)
    return nodes[0], tuple(nodes[1:])


def _split(flow: Flow, result: Any, start: CodeLine) -> tuple[Any, dict[str, Any]]:
    """The score, and the new state by name."""
    if not flow.state:
        if isinstance(result, tuple):
            raise fail("score returns one number per page; a tuple needs state= in the flow", start)
        return result, {}
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        names = ", ".join(f"{name!r}: new value" for name in flow.state)
        raise fail(f"score must return (score, {{{names}}}), got {_kind(result)}", start)
    _check_returned("state", "score", result[1], flow.state, start)
    return result


def _of_pages(what: str, value: Any, start: CodeLine) -> Node:
    node = _numbers(what, value, (), start)
    if not node.paged:
        problem = "is the same for every page: use a field or position.page"
        raise fail(f"{what} {problem}", node.place or start)
    return node


def _check_inputs(what: str, roots: Iterable[Node], inputs: Iterable[Tensor]) -> None:
    """Refuse tensors of another call."""
    node_ids = {id(tensor.node) for tensor in inputs}
    for node in in_order(roots):
        if not node.inputs and node.op not in ("constant", "full") and id(node) not in node_ids:
            raise fail(f"{what} uses the {node.op} of another call: fields carry what it needs")


# Running an author's function.


def _run(flow: Flow, function: Function, *arguments: object) -> Any:
    try:
        return function(*arguments)
    except FlowError:
        raise
    except Exception as error:  # whatever an author's code raises, with its line
        place = _place_of(error, function) or _start(flow, function)
        raise fail(f"{type(error).__name__}: {error}", place) from error


def _place_of(error: Exception, function: Function) -> CodeLine | None:
    """The innermost line of the author's file; of another one where the author called that."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in frames if is_author_frame(frame)]
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [place for place in lines if place[0] == file] or lines
    return CodeLine(*lines[-1]) if lines else None


def _start(flow: Flow, function: Function) -> CodeLine:
    code = getattr(function, "__code__", None)
    return flow.place if code is None else CodeLine(code.co_filename, code.co_firstlineno)


def _input(op: str, shape: tuple[int, ...], *details: str, paged: bool = False) -> Tensor:
    return Tensor(Node(op, (), shape, paged, details))


def _there(declared: Iterable[str]) -> str:
    return f" (declared: {', '.join(declared) or 'none'})"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_weights(program: Program, *, layers: int, kv_heads: int) -> None:
    """Refuse weights that were made for another number of layers or KV heads."""
    for node in in_order([*program.summary, *program.nodes]):
        if node.op == "constant" and node.given[1] == "by head":
            have, need = node.given[2], (layers, kv_heads)
            if have[0] < layers or have[1] != kv_heads:
                raise fail(f"weights for {have} layers and KV heads, not {need}", node.place)


# Content.


@cache
def _digest(program: Program) -> str:
    """A name for the content: operations, shapes, formats; not what things are called."""
    text = hashlib.sha256()
    number: dict[int, int] = {}
    names = {item.name: index for index, item in enumerate(program.fields)}
    names |= {name: index for index, (name, _) in enumerate(program.state)}
    roots = [*program.summary, *filter(None, [program.score]), *program.updates]
    for node in in_order(roots):
        number[id(node)] = len(number)
        details = [names[node.given[0]]] if node.op in ("field", "state") else list(node.given)
        inputs = [number[id(operand)] for operand in node.inputs]
        text.update(repr((node.op, inputs, node.shape, node.paged, details)).encode())
    text.update(repr([number[id(root)] for root in roots]).encode())
    text.update(repr([(item.form.kind, item.shape) for item in program.fields]).encode())
    sizes = [program.page, program.head_size, program.group, program.mass]
    sizes += [program.layers] if program.layers > 1 else []  # digests of before stay
    text.update(repr(sizes).encode())
    text.update(repr([value for _, value in program.state]).encode())
    return text.hexdigest()[:16]
