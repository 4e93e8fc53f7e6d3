"""Benchmark of exact decoding: rounds of sparse drafts and a dense verification, against dense.

Rows start at their length over random keys and values, as in the decode benchmark. Random weights
have no meaningful acceptance, so it is imposed: all work is done, only the verdict is drawn, with
the acceptance that was measured for each position of a round.

    ms_dense   wall time of a dense step of the engine
    ms_draft   device time of a draft step (mean of a round), ms_verify of a verification
    ms_round   wall time of a step of the engine that is a whole round

With new_tokens the requests of a case also run to their end, dense and exact. Prompts are computed
before the clock starts. Expected is the sum of steps and rounds, measured at the first and at the
last lengths (in between time is linear), the last ones also with fewer rows; how many rounds each
row took is read from its answer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow import models, ops
from sparrow.benchmarks import timing
from sparrow.benchmarks.decode import Case, ScheduleTimer, build, running
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE, batch_bucket
from sparrow.engine.requests import Sample
from sparrow.engine.runner import INT8_ROWS
from sparrow.engine.speculation import DraftRows
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device
from sparrow.ops.reference.sampling import uniforms
from sparrow.ops.reference.speculation import leading_accepted
from sparrow.schema.bench import ExactBenchmark, ExactRow, ExactRun
from sparrow.schema.sampling import Completion, DraftWeights, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

IMPOSED = 0x1234567  # the stream of uniforms of imposed verdicts
WARM = 3  # rounds before the clock starts
STEPS = 16  # timed draft steps and verifications
ROUNDS = 4  # timed of a complete run's first and last lengths


class ImposedDrafts(DraftRows):
    """Drafts whose verdict is drawn by given probabilities, after all work for it was done."""

    def __init__(self, drafts: DraftRows, acceptance_J: Sequence[float]) -> None:
        self.rows, self.state, self.held = drafts.rows, drafts.state, drafts.held
        self.acceptance_J = torch.tensor(acceptance_J, device=drafts.rows.device)

    def verify(
        self, logits_TV: Tensor, at_B: Tensor, step: ops.StepInputs, **how: Any
    ) -> ops.Verification:
        verdict = super().verify(logits_TV, at_B, step, **how)
        seeds_BQ, counters_BQ = (
            part.view_as(verdict.tokens_BQ) for part in (step.seeds_B, step.counters_B)
        )
        uniform_BJ = uniforms(seeds_BQ ^ IMPOSED, counters_BQ)[:, :-1]
        accept_BJ = uniform_BJ < self.acceptance_J[: uniform_BJ.shape[1]]
        accepted_B = leading_accepted(accept_BJ, self.state.count_R[at_B])
        return verdict._replace(emitted_B=accepted_B + 1)


def run(
    *,
    model: str | ModelSpec | None = None,
    cases: Sequence[Case] = (),
    draft_tokens: int = 8,
    reselect: int = 1,
    weights: DraftWeights = "model",
    acceptance: Sequence[float] = (0.95,),
    compare: str | None = None,
    flow: Flow = block_mean,
    dtype: str | None = None,
    rounds: int = 8,
    new_tokens: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExactBenchmark:
    """Measure every case.

    cases       (batch, context, schedule of the drafts)
    acceptance  by position in a round; the last one counts for those beyond
    compare     a schedule of sparse decoding that is timed beside it
    new_tokens  of every request, where cases also run to their end
    """
    target = pick_device("auto")
    on_gpu = target.type == "cuda"
    default: Case = (32, 16_384, "fixed-512-all") if on_gpu else (4, 1024, "fixed-256-all")
    cases = cases or [default]
    speculative = SpeculativeParams(draft_tokens=draft_tokens, reselect=reselect, weights=weights)
    for case in cases:
        _check_case(case, flow, speculative, rounds)
    name = model or ("qwen3-1.7b" if on_gpu else "smollm2-135m")
    decoder = models.random(name, dtype=timing.torch_dtype(dtype), device=target)
    behind = 2 if new_tokens is None else new_tokens + _room(ROUNDS, speculative)
    _check_positions(decoder.spec, cases, behind)
    by_position = [*acceptance, *[acceptance[-1]] * draft_tokens][:draft_tokens]
    rows: list[ExactRow] = []
    runs: list[ExactRun] = []
    for case in cases:
        if progress is not None:
            progress(f"batch {case[0]}, context {case[1]}")
        sparse = None if compare is None else _sparse_step(decoder, case, compare)
        timing.free_memory(target)
        rows.append(_measure(decoder, case, flow, speculative, by_position, rounds, sparse))
        timing.free_memory(target)
        if new_tokens is not None:
            runs += _complete(decoder, case, flow, speculative, by_position, new_tokens)
            timing.free_memory(target)
    return ExactBenchmark(
        **timing.model_fields(decoder, name),
        flow=flow.name,
        draft_tokens=draft_tokens,
        reselect=reselect,
        weights=weights,
        acceptance=tuple(by_position),
        compare=compare,
        rows=tuple(rows),
        runs=tuple(runs),
    )


def _check_case(case: Case, flow: Flow, speculative: SpeculativeParams, rounds: int) -> None:
    """Refuse what cannot be measured before anything is built."""
    batch, context, name = case
    if speculative.weights == "int8" and batch > INT8_ROWS:
        raise ValueError(f"case {batch},{context}: int8 weights are for up to {INT8_ROWS} rows")
    schedule = timing.schedule_named(name, flow)
    if schedule is None:
        raise ValueError(f"case {case[0]},{context}: drafts need a schedule, such as fixed-512-all")
    Rule.like(schedule, flow).check_drafts(speculative.draft_tokens, PAGE)
    least = _room(max(STEPS, rounds), speculative) + 1
    if context < least:
        raise ValueError(
            f"context {context}: {rounds} rounds of {speculative.draft_tokens} drafts need {least}"
        )


def _check_positions(spec: ModelSpec, cases: Sequence[Case], behind: int) -> None:
    """Refuse contexts that leave too few positions of the model behind them."""
    for _, context, _ in cases:
        if context + behind > spec.max_positions:
            most = spec.max_positions
            problem = f"{behind} positions behind it are used, and the model has {most}"
            raise ValueError(f"context {context}: {problem}")


def _room(rounds: int, speculative: SpeculativeParams) -> int:
    """Tokens of so many rounds, with those before the clock starts and behind it."""
    return (rounds + WARM + 2) * (speculative.draft_tokens + 1)


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
    speculative: SpeculativeParams,
    acceptance: Sequence[float],
    rounds: int,
    sparse: float | None,
) -> ExactRow:
    batch, context, name = case
    schedule = timing.schedule_named(name, flow)
    assert schedule is not None, "drafts need a schedule"
    engine = build(decoder, Rule.like(schedule, flow), batch, context, speculative)
    engine.runner.draft_rows = ImposedDrafts(engine.runner.drafts, acceptance)
    (dense,) = ScheduleTimer(engine=engine, context=context, steps=32).measure([None], 3, False)
    bench = _Rounds(engine, schedule, context, speculative, rounds)
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
        self,
        engine: Engine,
        schedule: Schedule,
        context: int,
        speculative: SpeculativeParams,
        rounds: int,
    ) -> None:
        self.engine, self.schedule, self.context = engine, schedule, context
        self.speculative, self.rounds = speculative, rounds

    @contextmanager
    def _warm(self, rounds: int) -> Iterator[list[Sample]]:
        engine, room = self.engine, _room(rounds, self.speculative)
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
        count, reselect = self.speculative.draft_tokens, self.speculative.reselect
        drafted_R, length_R = runner.drafts.state.count_R, runner.rows.length_R
        with self._warm(STEPS) as samples:
            start_R = length_R.clone()

            def draft() -> None:
                drafted_R.zero_()
                length_R.copy_(start_R)
                for number in range(count):
                    ahead = min(reselect, count - number) - 1 if number % reselect == 0 else 0
                    runner.decode(samples, ahead=ahead, reuse=number % reselect > 0)

            def verify() -> None:
                drafted_R.fill_(count)
                length_R.copy_(start_R + count)
                runner.verify(samples)

            for sample in samples:
                sample.drafts = count
            taken = [
                median(timing.device_seconds(work, STEPS, device) for _ in range(3))
                for work in (draft, verify)
            ]
            drafted_R.zero_()
            length_R.copy_(start_R)
        return taken[0] / count, taken[1]


# Complete runs.


def _complete(
    decoder: Decoder,
    case: Case,
    flow: Flow,
    speculative: SpeculativeParams,
    acceptance: Sequence[float],
    new_tokens: int,
) -> Iterator[ExactRun]:
    """Dense and exact runs of requests to their end, beside the sum of measured steps."""
    batch, context, name = case
    schedule = timing.schedule_named(name, flow)
    assert schedule is not None, "drafts need a schedule"
    room = new_tokens + _room(ROUNDS, speculative)
    engine = build(decoder, Rule.like(schedule, flow), batch, context + room, speculative)
    engine.runner.draft_rows = ImposedDrafts(engine.runner.drafts, acceptance)
    batch = engine.max_running
    draw = np.random.default_rng(0)
    unit = engine.policy.quantum  # of what the cache has of a prompt; one token is left to compute
    lengths = (np.linspace(context // 2, context, batch) // unit * unit + 1).astype(int).tolist()
    prompts = [draw.integers(decoder.spec.vocabulary, size=n).tolist() for n in lengths]
    dense_s: float | None = None
    for who, how in (("dense", {}), ("exact", {"schedule": schedule, "speculative": speculative})):
        steps = _StepTimes(engine, lengths, new_tokens, how)
        prompts_s, _ = _generate(engine, prompts, 1, {})
        _generate(engine, prompts, new_tokens, how)  # captures the graphs of all its steps
        seconds, done = _generate(engine, prompts, new_tokens, how)
        expected, dense_s = steps.total(done), dense_s or seconds
        yield ExactRun(
            who=who,
            batch=batch,
            context=context,
            new_tokens=new_tokens,
            seconds_prompts=prompts_s,
            seconds=seconds,
            expected=expected,
            ratio=seconds / expected,
            tokens_per_s=batch * new_tokens / seconds,
            speed_up=dense_s / seconds,
        )


def _generate(
    engine: Engine, prompts: Sequence[list[int]], tokens: int, how: dict[str, Any]
) -> tuple[float, list[Completion]]:
    """Seconds of a run, and its answers; prompts of an earlier run are still in the cache."""
    alike: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    params = [SamplingParams(**alike, seed=number) for number in range(len(prompts))]
    done: list[Completion] = []

    def work() -> None:
        done.extend(engine.generate(prompts, params, **how))

    return timing.seconds(work, engine.model.device), done


class _StepTimes:
    """Seconds of steps of a batch from its first to its last lengths, and of its last rows."""

    def __init__(
        self, engine: Engine, lengths: Sequence[int], new_tokens: int, how: dict[str, Any]
    ) -> None:
        self.engine, self.how = engine, how
        self.first = self._seconds(lengths)
        ends = [length + new_tokens for length in lengths]
        sizes = {batch_bucket(count) for count in range(1, len(lengths))} | {len(lengths)}
        self.last = {count: self._seconds(ends[-count:]) for count in sizes if count <= len(ends)}

    def _seconds(self, contexts: Sequence[int]) -> float:
        engine, speculative = self.engine, self.how.get("speculative")
        room = ROUNDS + WARM + 2 if speculative is None else _room(ROUNDS, speculative)
        how = {"schedule": None} | self.how | {"room": room}
        with running(engine, contexts, **how):
            timing.repeat(engine.step, WARM)
            engine.loop.drain()
            work = partial(timing.repeat, engine.step, ROUNDS)
            return timing.seconds(work, engine.model.device) / ROUNDS

    def total(self, done: Sequence[Completion]) -> float:
        """Seconds of these answers, whose first tokens came with their prompts."""
        steps = [
            len(each.token_ids) - 1 if each.speculation is None else each.speculation.rounds
            for each in done
        ]
        rows_T = (np.array(steps) > np.arange(max(steps))[:, None]).sum(1)
        share_T = np.arange(len(rows_T)) / len(rows_T)
        counts = sorted(self.last)
        last_T = np.interp(rows_T, counts, [self.last[count] for count in counts])
        whole = self.last[len(done)]
        return float(np.sum(last_T * (self.first + (whole - self.first) * share_T) / whole))
