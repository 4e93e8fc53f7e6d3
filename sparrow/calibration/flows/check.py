"""Checks a flow: its program, its bytes, and a differential test of its implementations.

The test decodes random sequences token by token through a page cache, as an engine does, and scores
the same sequences in one pass, as calibration and training do. Both must keep the same pages. Where
scores are equal up to rounding either page is right, so there the kept scores are compared.
Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparrow import ops
from sparrow.calibration.flows.score import Selection, kept_pages, page_mask
from sparrow.schema.flow import FlowCheck, FlowField, FlowTest
from sparrow.sparse.compile.kernels import module
from sparrow.sparse.flows.flow import Flow, Program, trace
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.tensor import FlowError, in_order
from sparrow.sparse.rule import Rule

KV_HEADS = 2
# What two orders of summing may make of a score, as a share of the greatest one: in float32, and
# where a number of a field then rounds to its neighbour.
ROUNDING = {"fp32": 1e-4, "fp16": 5e-4, "bf16": 2e-3, "fp8": 1e-2, "int4": 2e-2}
MOST_NEAR = 0.02  # of all choices may differ by near ties, unless a trial is made of ties


def kernels(program: Program) -> dict[str, str]:
    """Describe the generated kernels of a program, or why there are none.

    Generating needs neither a GPU nor Triton. A flow without kernels runs on CPUs only.
    """
    if program.score is None:
        return {"none": "every page is kept, nothing is stored"}
    try:
        text = module(program, torch.bfloat16, block=16)
    except FlowError as error:
        return {"refused": str(error)}
    compile(text, "<generated>", "exec")
    chosen = "finishes scores over all pages and selects"
    return {
        "append": "writes tokens, finishes pages" if program.fields else "nothing to finish",
        "score": "reads fields, by blocks of pages",
        "choose": chosen if "def choose(" in text else "the common selection kernel",
    }


# The differential test.


class Trial(NamedTuple):
    """A random sequence under a budget, for the differential test."""

    what: str
    length: int
    budget: int
    coarse: bool = False  # keys and values of few whole numbers, pages repeated: scores tie


def sequences(page: int, reserved: int) -> list[Trial]:
    """Odd lengths, ties, one page, and budgets that are met exactly."""
    least, odd = reserved * page, 9 * page + page // 2 + 1
    exact = (reserved + 2) * page
    return [
        Trial("odd length", odd, least + 2 * page + page // 2 + 1),
        Trial("least budget", odd - 1, least),
        Trial("ties", 8 * page + 1, least + 2 * page, coarse=True),
        Trial("one token", 1, least),
        Trial("part of a page", max(1, page - 1), least),
        Trial("one page", page, least),
        Trial("one page and a token", page + 1, least),
        Trial("budget of the length", exact, exact),
        Trial("one below it", exact, exact - 1),
    ]


@torch.no_grad()
def check(
    flow: Flow,
    *,
    page: int = 16,
    head_size: int = 128,
    group: int = 2,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> FlowCheck:
    """Trace a flow for these sizes and test it; FlowError names the author's line if it is broken.

    `passed` is the verdict.
    """
    program, keys = trace(flow, page, head_size, group), torch.bfloat16
    mean, stored = 2 * head_size, program.bytes(keys)
    counts = Counter(node.op for node in program.nodes if node.inputs)
    bed = None if program.score is None else _Trials(flow, program, torch.device(device), seed)
    tests = () if bed is None else tuple(bed.compare())
    return FlowCheck(
        flow=program.name,
        digest=program.digest,
        page=page,
        head_size=head_size,
        group=group,
        fields=tuple(
            FlowField(name=item.name, kind=item.form.kind, shape=item.shape, bytes=item.bytes(keys))
            for item in program.fields
        ),
        bytes=stored,
        of_mean=program.read_of_mean,
        of_kv=stored / (2 * page * mean),
        state=dict(program.state),
        mass=program.mass,
        operations=sum(counts.values()),
        over_pages={op: n for op, n in counts.items() if op.startswith(("pages_", "convolve"))},
        kernels=(generated := kernels(program)),
        compiles="refused" not in generated,
        device=str(device),
        tests=tests,
        passed=all(test.passed for test in tests),
        unordered=0 if bed is None else bed.unordered,
    )


class _Trials:
    """Random sequences, and the pages that each implementation keeps of them."""

    def __init__(self, flow: Flow, program: Program, device: torch.device, seed: int) -> None:
        self.rule = Rule(flow=flow, dense_layers=frozenset())
        self.program, self.device = program, device
        self.kv_heads = _kv_heads(program)
        self.cases = sequences(program.page, self.rule.first + self.rule.last)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = zip(*(self._tokens(c, draw) for c in self.cases), strict=True)
        self.width = max(-(-case.length // program.page) for case in self.cases)
        pages = len(self.cases) * self.width
        self.table_BM = torch.randperm(pages, generator=draw).view(-1, self.width).int().to(device)
        self.choices_within = sum(node.op == "best" for node in program.nodes)
        self.unordered = 0  # scores that are no numbers: such pages are kept last

    def _tokens(self, case: Trial, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.kv_heads * self.program.group, self.kv_heads, self.kv_heads)
        shapes = [(case.length, count, self.program.head_size) for count in heads]
        tokens = [torch.randn(shape, generator=draw) for shape in shapes]
        if case.coarse:
            every = 2 * self.program.page  # two pages by turns: all others tie with one of them
            tokens = [x.round()[torch.arange(case.length) % every] for x in tokens]
        q, k, v = (x.to(self.device, self.dtype) for x in tokens)
        return q, k, v

    def compare(self) -> list[FlowTest]:
        scores = [self._scores(row) for row in range(len(self.cases))]
        whole = [self._select(row, score) for row, score in enumerate(scores)]
        steps = self._decode()
        pairs = [("decode and one pass", whole)]
        if self._has_versions():
            with ops.using("reference"):
                pairs.append(("decode and its definition", self._decode()))
        return [
            self._outcome(row, name, steps[row], others[row], scores[row])
            for name, others in pairs
            for row in range(len(self.cases))
        ]

    def _has_versions(self) -> bool:
        """Whether decoding runs anything but the definition here: kernels, or the block mean's."""
        sizes = (self.program.page, self.program.head_size, self.program.group)
        return self.device.type == "cuda" or self.program.digest == trace(block_mean, *sizes).digest

    # One pass.

    def _scores(self, row: int) -> Tensor:
        """Of all tokens of a sequence, [S, G, M], padded for the page that is not finished."""
        length, page = self.cases[row].length, self.program.page
        scorer = self.rule.scorer(0, page)
        assert scorer is not None
        budgets_S = torch.full((length,), self.cases[row].budget, device=self.device)
        score_SGM = scorer(self.q[row], self.k[row], self.v[row], 0, budgets_S)(0, length)
        shown = torch.arange(score_SGM.shape[2], device=self.device) < (
            torch.arange(1, length + 1, device=self.device)[:, None] // page
        )
        self.unordered += int((score_SGM.isnan() & shown[:, None]).sum())
        score_SGM = score_SGM.masked_fill(~shown[:, None], float("-inf"))
        pad = -(-length // page) - score_SGM.shape[2]
        return torch.nn.functional.pad(score_SGM, (0, pad), value=float("-inf"))

    def _select(self, row: int, score_SGM: Tensor) -> Tensor:
        lengths_S = torch.arange(1, len(score_SGM) + 1, device=self.device)
        case = Selection(rule=self.rule, page=self.program.page, budget=self.cases[row].budget)
        return kept_pages(case, score_SGM, lengths_S, self.rule.mass)

    # Token by token.

    def _decode(self) -> list[Tensor]:
        """The pages that every token kept, bool [S, G, M] by sequence."""
        cache, count = self._cache(), len(self.cases)
        lengths = torch.tensor([case.length for case in self.cases], device=self.device)
        budgets_B = torch.tensor([case.budget for case in self.cases], device=self.device)
        rows_B = torch.arange(count, device=self.device)
        q_SBHD, k_SBGD, v_SBGD = (pad_sequence([*x]) for x in (self.q, self.k, self.v))
        kept = []
        for at in range(int(lengths.max())):
            length_B = torch.where(lengths > at, at + 1, 0)
            block_B = self.table_BM[:, at // self.program.page].long()
            slots_B = block_B * self.program.page + at % self.program.page
            slots_B = torch.where(length_B > 0, slots_B, -1)
            self.rule.append(cache, 0, k_SBGD[at], v_SBGD[at], slots_B)
            row_inputs = (q_SBHD[at], self.table_BM, length_B, budgets_B, rows_B)
            lists = self.rule.select(cache, 0, *row_inputs)
            assert lists is not None
            kept.append(page_mask(lists, self.width))
        every_SBGM = torch.stack(kept)
        return [
            every_SBGM[: case.length, row, :, : -(-case.length // self.program.page)]
            for row, case in enumerate(self.cases)
        ]

    def _cache(self) -> ops.PageCache:
        page, head_size = self.program.page, self.program.head_size
        kv = ops.kv_fields(page, head_size, self.dtype)
        summaries = self.rule.fields(page=page, head_size=head_size, dtype=self.dtype)
        cache = ops.PageCache(
            layers=1,
            kv_heads=self.kv_heads,
            page=page,
            pages=self.table_BM.numel(),
            page_fields=(*kv, *summaries),
            slots=len(self.cases),
            state_fields=self.rule.states(self.width),
            device=self.device,
        )
        for slot in range(len(self.cases)):
            cache.begin(slot)
        return cache

    # The verdict.

    def _outcome(
        self, row: int, name: str, a_SGM: Tensor, b_SGM: Tensor, score_SGM: Tensor
    ) -> FlowTest:
        case = self.cases[row]
        differ = (a_SGM != b_SGM).any(2).nonzero().tolist()
        wrong = [
            (token, head)
            for token, head in differ
            if not self._near(a_SGM[token, head], b_SGM[token, head], score_SGM[token, head])
        ]
        first = ""
        if wrong:
            token, head = wrong[0]
            kept = (x[token, head].nonzero()[:, 0].tolist() for x in (a_SGM, b_SGM))
            first = "length {}, KV head {}: pages {} against {}".format(token + 1, head, *kept)
        choices, near, ties = a_SGM.shape[0] * a_SGM.shape[1], len(differ) - len(wrong), case.coarse
        return FlowTest(
            sequence=case.what,
            compared=name,
            choices=choices,
            near_ties=near,
            different=len(wrong),
            ties=ties,
            first=first,
            passed=not wrong and (ties or near <= max(1, MOST_NEAR * choices)),
        )

    def _near(self, a_M: Tensor, b_M: Tensor, score_M: Tensor) -> bool:
        """Whether two choices differ only by pages of equal score, up to rounding."""
        if self.choices_within and int((a_M & ~b_M).sum()) <= self.choices_within:
            return True  # a near tie of a choice within the formula, which scores do not show
        finite = score_M[score_M.isfinite()].abs()
        room = self._rounding() * float(finite.max()) if len(finite) else 0.0
        if self.rule.mass is not None and int(a_M.sum()) != int(b_M.sum()):
            # The shorter list must hold the asked share of mass, up to rounding.
            fewer_M = a_M if int(a_M.sum()) < int(b_M.sum()) else b_M
            mass_M = score_M.nan_to_num(nan=0.0, neginf=0.0).clamp(min=0)
            held = float(mass_M[fewer_M].sum()) / max(float(mass_M.sum()), 1e-30)
            return abs(held - self.rule.mass) <= self._rounding()
        scores, others = (score_M[x & ~y].sort().values for x, y in ((a_M, b_M), (b_M, a_M)))
        return len(scores) == len(others) and bool(((scores - others).abs() <= room).all())

    def _rounding(self) -> float:
        kinds = [field.form.kind for field in self.program.fields]
        keys = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return max(ROUNDING[keys if kind == "keys" else kind] for kind in ["fp32", *kinds])


def _kv_heads(program: Program) -> int:
    """KV heads to test with: as many as learned weights have, where a program has some."""
    for node in in_order([*program.summary, *program.nodes]):
        if node.op == "constant" and node.given[1] == "by head":
            return int(node.given[2][1])
    return KV_HEADS
