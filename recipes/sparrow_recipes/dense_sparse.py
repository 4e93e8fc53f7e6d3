"""Time dense, sparse and exact decoding on this machine: a rollout, and steps at a long context.

Two cases: a rollout of puzzles under a schedule, every answer to its full length so that all
ways draw equally many tokens; and decode steps at a long context over random keys and values,
with one budget and the schedule's dense layers. Times are of one token of the whole batch; those of
the rollout have their share of reading the prompts.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sparrow import load
from sparrow.benchmarks import decode, timing
from sparrow.dataflow.prompts import of_task
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.reporting.training import EQUAL
from sparrow.schema.bench import Speed, SpeedCase
from sparrow.schema.sampling import SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import Progress
from sparrow.sparse.rule import Rule

ROUNDS = 3
TIMED = 3 * ROUNDS  # rollouts
DRAFTS = SpeculativeParams(draft_tokens=4)
STEPS = 12  # decode steps of a round at a long context
LITTLE = "there is little to skip at this length, and choosing pages is extra work at every step"
EVEN = "what reading less saves and what choosing pages costs about even out at this length"

MUCH = "most of a step is reading the text, and less of it is read"


class Workload(NamedTuple):
    """The workload: answers to prompts of a task, and decode steps of rows at a context."""

    task: str
    length: int
    prompts: int
    samples: int  # answers to a prompt
    tokens: int  # of an answer
    context: int
    budget: int
    batch: int


def run(name: str, schedule: Path, workload: Workload, progress: Progress) -> Speed:
    """Time both cases on the CPU."""
    model, kept = load(name, device="cpu"), Schedule.load(schedule)
    short = _rollout(model, kept, workload, progress)
    progress(TIMED, TIMED + 2, f"decoding at {workload.context} tokens")
    long = _decode(model, kept, workload)
    progress(TIMED + 2, TIMED + 2, "timed")
    dtype = str(model.dtype).removeprefix("torch.")
    note = f"{model.spec.parameters() / 1e6:.1f} M weights in {dtype}."
    return Speed(machine=timing.machine(model.device), note=note, cases=(short, long))


def _rollout(
    model: Decoder, schedule: Schedule, workload: Workload, progress: Progress
) -> SpeedCase:
    source = of_task(model, workload.task, length=workload.length, count=workload.prompts)
    prompts = [prompt.ids for prompt in source.prompts]
    longest, rows = max(map(len, prompts)) + workload.tokens, len(prompts) * workload.samples
    engine = Engine(model, max_running=rows, max_context=longest, rule=Rule.like(schedule))
    params = SamplingParams(n=workload.samples, max_tokens=workload.tokens, ignore_eos=True, seed=0)
    ways = {
        "dense": partial(engine.generate, prompts, params),
        "sparse": partial(engine.generate, prompts, params, schedule=schedule),
        "exact": partial(engine.generate, prompts, params, schedule=schedule, speculative=DRAFTS),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):  # the first one warms up and does not count
        for place, way in enumerate(ways if turn % 2 == 0 else reversed(ways)):
            done = max(0, len(ways) * (turn - 1) + place)
            progress(done, TIMED + 2, "rolling out, dense, sparse and exact in turns")
            seconds = timing.seconds(ways[way], model.device)
            taken[way] += [seconds / workload.tokens * 1e3] if turn else []
    name, what = f"Up to {longest} tokens", f"{rows} answers rolled out under the schedule"
    case = _case(name, longest, what, taken["dense"], taken["sparse"])
    return case.replace(exact_ms=tuple(taken["exact"]))


def _decode(model: Decoder, schedule: Schedule, workload: Workload) -> SpeedCase:
    # Rows end at the context, and an engine needs a little room beyond.
    positions = max(model.spec.max_positions, workload.context + 64)
    layers = ",".join(map(str, schedule.dense_layers))
    kept = f"fixed-{workload.budget}" + (f"-dense-{layers}" if layers else "-all")
    result = decode.run(
        model=replace(model.spec, max_positions=positions),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        cases=[(workload.batch, workload.context, way) for way in (None, kept)],
        steps=STEPS,
        rounds=ROUNDS,
        split=False,
    )
    dense, sparse = (list(row.ms_step_rounds) for row in result.rows)
    but = f", everything in layer {layers}" if layers else ""
    what = f"{workload.batch} rows of random text, {workload.budget} tokens kept{but}"
    doubt = "; whether so few tokens suffice at this length was not measured"
    return _case(f"At {workload.context} tokens", workload.context, what, dense, sparse, doubt)


def _case(
    name: str, context: int, what: str, dense: list[float], sparse: list[float], but: str = ""
) -> SpeedCase:
    """The times of a case, with an explanation by which side was faster."""
    ratio = median(dense) / median(sparse)
    why = (EVEN if abs(ratio - 1) < EQUAL else MUCH if ratio > 1 else LITTLE) + but
    times = {"dense_ms": tuple(dense), "sparse_ms": tuple(sparse)}
    return SpeedCase(name=name, context=context, what=what, why=why, **times)
