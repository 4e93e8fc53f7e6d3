"""Dense against sparse decoding on this machine, in turns: short rows as rolled out, long ones.

Two cases: a rollout of given prompts under a schedule, every answer to its full length so that both
sides draw equally many tokens; and decode steps at a long context over random keys and values,
with one budget and the schedule's dense layers. Times are of one token of the whole batch; those of
the rollout have their share of reading the prompts.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from sparrow.bench import decode, timing
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.schema.bench import Speed, SpeedCase
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import Progress
from sparrow.sparse.rule import Rule

STEPS = 12  # decode steps of a round at a long context
LITTLE = "there is little to skip at this length, and choosing pages is extra work at every step"
EVEN = "what reading less saves and what choosing pages costs about even out at this length"
EQUAL = 0.02  # ratios nearer to 1 than this are noise
MUCH = "most of a step is reading the text, and less of it is read"


def run(
    model: Decoder,
    schedule: Schedule,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    tokens: int,
    context: int,
    budget: int,
    batch: int,
    rounds: int = 3,
    progress: Progress | None = None,
) -> Speed:
    """Both cases.

    prompts, samples, tokens   the rollout: so many answers of so many tokens to each prompt
    context, budget, batch     the decode steps: past tokens, tokens kept, rows
    """
    tell = progress or (lambda done, total, what: None)
    tell(0, 2 * rounds + 2, "rolling out, dense and sparse in turns")
    short = _rollout(model, schedule, prompts, samples, tokens, rounds, tell)
    tell(2 * rounds, 2 * rounds + 2, f"decoding at {context} tokens")
    long = _decode(model, schedule, context, budget, batch, rounds)
    tell(2 * rounds + 2, 2 * rounds + 2, "timed")
    dtype = str(model.dtype).removeprefix("torch.")
    note = f"{model.spec.parameters() / 1e6:.1f} M weights in {dtype}."
    return Speed(machine=timing.machine(model.device), note=note, cases=(short, long))


def _rollout(
    model: Decoder,
    schedule: Schedule,
    prompts: Sequence[Sequence[int]],
    samples: int,
    tokens: int,
    rounds: int,
    tell: Progress,
) -> SpeedCase:
    longest = max(map(len, prompts)) + tokens
    rows = len(prompts) * samples
    engine = Engine(model, max_running=rows, max_context=longest, rule=Rule.like(schedule))
    params = SamplingParams(n=samples, max_tokens=tokens, ignore_eos=True, seed=0)
    ways = {"dense": None, "sparse": schedule}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first one warms up and does not count
        for place, (name, own) in enumerate(_order(ways, turn)):
            begun = time.perf_counter()
            engine.generate(prompts, params, schedule=own)
            if turn:
                taken[name].append((time.perf_counter() - begun) / tokens * 1e3)
            done = max(0, 2 * (turn - 1) + place + 1)
            tell(done, 2 * rounds + 2, "rolling out, dense and sparse in turns")
    return _case(
        name=f"Up to {longest} tokens",
        context=longest,
        what=f"{rows} answers rolled out under the schedule",
        dense=taken["dense"],
        sparse=taken["sparse"],
    )


def _order(ways: dict[str, Schedule | None], turn: int) -> list[tuple[str, Schedule | None]]:
    """Who goes first changes with the turn."""
    pairs = list(ways.items())
    return pairs if turn % 2 == 0 else pairs[::-1]


def _decode(
    model: Decoder, schedule: Schedule, context: int, budget: int, batch: int, rounds: int
) -> SpeedCase:
    # Rows end at the context, and an engine needs a little room beyond.
    shape = replace(model.spec, max_positions=max(model.spec.max_positions, context + 64))
    layers = ",".join(map(str, schedule.dense_layers))
    kept = f"fixed-{budget}" + (f"-dense-{layers}" if layers else "-all")
    found = decode.run(
        model=shape,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        cases=[(batch, context, None), (batch, context, kept)],
        steps=STEPS,
        rounds=rounds,
        split=False,
    )
    dense, sparse = (list(row.ms_step_rounds) for row in found.rows)
    but = f", everything in layer {layers}" if layers else ""
    return _case(
        name=f"At {context} tokens",
        context=context,
        what=f"{batch} rows of random text, {budget} tokens kept{but}",
        dense=dense,
        sparse=sparse,
        but="; whether so few tokens suffice at this length was not measured",
    )


def _case(
    *, name: str, context: int, what: str, dense: list[float], sparse: list[float], but: str = ""
) -> SpeedCase:
    """What was timed, what came out, and why: by which side was faster."""
    ratio = median(dense) / median(sparse)
    why = EVEN if abs(ratio - 1) < EQUAL else MUCH if ratio > 1 else LITTLE
    return SpeedCase(
        name=name,
        context=context,
        what=what,
        dense_ms=tuple(dense),
        sparse_ms=tuple(sparse),
        why=why + but,
    )
