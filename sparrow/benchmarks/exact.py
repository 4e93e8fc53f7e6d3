"""Benchmark of exact decoding: rounds of sparse drafts and a dense verification, against dense.

Rows start at their length over random keys and values, as in the decode benchmark. Random weights
have no meaningful acceptance, so it is imposed: all work is done, only the verdict is drawn, with
the acceptance that was measured for each position of a round.

    ms_dense   wall time of a dense step of the engine
    ms_draft   device time of a draft step, ms_verify of a verification of all drafts
    ms_round   wall time of a step of the engine that is a whole round
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparrow import models, ops
from sparrow.benchmarks import timing
from sparrow.benchmarks.decode import Case, ScheduleTimer, build, running
from sparrow.engine.engine import Engine
from sparrow.engine.requests import Sample
from sparrow.engine.speculation import DraftRows
from sparrow.models.checkpoint import pick_device
from sparrow.models.decoder import Decoder
from sparrow.ops.reference.sampling import uniforms
from sparrow.ops.reference.speculation import leading_accepted
from sparrow.schema.bench import ExactBenchmark, ExactRow
from sparrow.schema.sampling import SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

IMPOSED = 0x1234567  # the stream of uniforms of imposed verdicts
WARM = 3  # rounds before the clock starts
STEPS = 16  # timed draft steps and verifications


class ImposedDrafts(DraftRows):
    """Drafts whose verdict is drawn by given probabilities, after all work for it was done."""

    def __init__(self, drafts: DraftRows, acceptance_J: Sequence[float]) -> None:
        self.rows, self.state = drafts.rows, drafts.state
        self.acceptance_J = torch.tensor(acceptance_J, device=drafts.rows.device)

    def verify(
        self, logits_TV: Tensor, at_B: Tensor, step: ops.StepInputs, **how: Any
    ) -> ops.Verification:
        verdict = super().verify(logits_TV, at_B, step, **how)
        seeds_BQ, counters_BQ = (
            part.view_as(verdict.tokens_BQ) for part in (step.seeds_B, step.counters_B)
        )
        accept_BJ = uniforms(seeds_BQ ^ IMPOSED, counters_BQ)[:, :-1] < self.acceptance_J
        accepted_B = leading_accepted(accept_BJ, self.state.count_R[at_B])
        return verdict._replace(emitted_B=accepted_B + 1)


def run(
    *,
    model: str | None = None,
    cases: Sequence[Case] = (),
    draft_tokens: int = 8,
    acceptance: Sequence[float] = (0.95,),
    compare: str | None = None,
    flow: Flow = block_mean,
    dtype: str | None = None,
    rounds: int = 8,
    progress: Callable[[str], None] | None = None,
) -> ExactBenchmark:
    """Measure every case.

    cases       (batch, context, schedule of the drafts)
    acceptance  by position in a round; the last one counts for those beyond
    compare     a schedule of sparse decoding that is timed beside it
    """
    target = pick_device("auto")
    on_gpu = target.type == "cuda"
    name = model or ("qwen3-1.7b" if on_gpu else "smollm2-135m")
    decoder = models.random(name, dtype=timing.torch_dtype(dtype), device=target)
    default: Case = (32, 16_384, "fixed-512-all") if on_gpu else (4, 1024, "fixed-256-all")
    by_position = [*acceptance, *[acceptance[-1]] * draft_tokens][:draft_tokens]
    rows = []
    for case in cases or [default]:
        if progress is not None:
            progress(f"batch {case[0]}, context {case[1]}")
        sparse = None if compare is None else _sparse_step(decoder, case, compare)
        timing.free_memory(target)
        rows.append(_measure(decoder, case, flow, by_position, rounds, sparse))
        timing.free_memory(target)
    return ExactBenchmark(
        **timing.model_fields(decoder, name),
        flow=flow.name,
        draft_tokens=draft_tokens,
        acceptance=tuple(by_position),
        compare=compare,
        rows=tuple(rows),
    )


def _sparse_step(decoder: Decoder, case: Case, compare: str) -> float:
    """Seconds of a step of sparse decoding."""
    schedule = timing.schedule_named(compare)
    assert schedule is not None
    engine = build(decoder, Rule.like(schedule), *case[:2])
    timer = ScheduleTimer(engine=engine, context=case[1], steps=min(64, case[1] // 4))
    (row,) = timer.measure([compare], 3, False)
    return row.ms_step / 1e3


def _measure(
    decoder: Decoder,
    case: Case,
    flow: Flow,
    acceptance: Sequence[float],
    rounds: int,
    sparse: float | None,
) -> ExactRow:
    batch, context, name = case
    schedule, drafts = timing.schedule_named(name, flow), len(acceptance)
    assert schedule is not None, "drafts need a schedule"
    rule, speculative = Rule.like(schedule, flow), SpeculativeParams(draft_tokens=drafts)
    engine = build(decoder, rule, batch, context, speculative)
    engine.runner.draft_rows = ImposedDrafts(engine.runner.drafts, acceptance)
    (dense,) = ScheduleTimer(engine=engine, context=context, steps=32).measure([None], 3, False)
    bench = _Rounds(engine, schedule, context, drafts, rounds)
    draft, verify = bench.device_seconds()
    per_round, tokens = bench.wall_seconds()
    batch, dense_s = engine.max_running, dense.ms_step / 1e3
    return ExactRow(
        batch=batch,
        context=context,
        schedule=name,
        ms_dense=dense_s * 1e3,
        ms_dense_device=dense.ms_device,
        ms_sparse=None if sparse is None else sparse * 1e3,
        ms_draft=draft * 1e3,
        ms_verify=verify * 1e3,
        ms_round=per_round * 1e3,
        verify_to_dense=verify * 1e3 / dense.ms_device,
        tokens_per_round=tokens,
        tokens_per_s_dense=batch / dense_s,
        tokens_per_s_sparse=None if sparse is None else batch / sparse,
        tokens_per_s=batch * tokens / per_round,
        speed_up=tokens / per_round * dense_s,
        speed_up_sparse=None if sparse is None else dense_s / sparse,
    )


class _Rounds:
    """Rounds of one engine, whose rows end before a context."""

    def __init__(
        self, engine: Engine, schedule: Schedule, context: int, drafts: int, rounds: int
    ) -> None:
        self.engine, self.schedule, self.context = engine, schedule, context
        self.speculative, self.rounds = SpeculativeParams(draft_tokens=drafts), rounds

    @contextmanager
    def _warm(self, rounds: int) -> Iterator[list[Sample]]:
        engine, drafts = self.engine, self.speculative.draft_tokens
        room = (rounds + WARM + 2) * (drafts + 1)
        contexts = [self.context - room] * engine.max_running
        how: dict[str, Any] = {"room": room, "speculative": self.speculative}
        with running(engine, contexts, self.schedule, **how) as samples:
            timing.repeat(engine.step, WARM)
            engine.loop.drain()
            timing.synchronize(engine.model.device)
            yield samples

    def wall_seconds(self) -> tuple[float, float]:
        """Seconds of a round of the engine, and tokens that a row gets in it."""
        with self._warm(self.rounds) as samples:
            before = sum(len(sample.tokens) for sample in samples)
            work = partial(timing.repeat, self.engine.step, self.rounds)
            seconds = timing.seconds(work, self.engine.model.device)
            self.engine.loop.drain()
            tokens = sum(len(sample.tokens) for sample in samples) - before
        return seconds / self.rounds, tokens / (self.rounds * len(samples))

    def device_seconds(self) -> tuple[float, float]:
        """Seconds of a draft step, and of a verification of all drafts."""
        runner, device = self.engine.runner, self.engine.model.device
        drafts, rows = runner.drafts.state, runner.rows
        with self._warm(STEPS) as samples:
            length_R = rows.length_R.clone()

            def draft() -> None:
                drafts.count_R.zero_()
                rows.length_R.copy_(length_R)
                runner.decode(samples)

            def verify() -> None:
                drafts.count_R.fill_(self.speculative.draft_tokens)
                rows.length_R.copy_(length_R + self.speculative.draft_tokens)
                runner.verify(samples)

            for sample in samples:
                sample.drafts = self.speculative.draft_tokens
            taken = [
                median(timing.device_seconds(work, STEPS, device) for _ in range(3))
                for work in (draft, verify)
            ]
            drafts.count_R.zero_()
            rows.length_R.copy_(length_R)
        return taken[0], taken[1]
