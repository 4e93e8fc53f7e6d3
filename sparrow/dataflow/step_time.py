"""How long a training step will take: the planner's step model for rollout, FLOPs for the rest.

    rollout   decode steps of a trace of sequences, by the machine's fitted times
    log-probs 2 N T + causal attention, one dense pass
    update    6 N T + causal attention three times, and the forward pass again with recompute

over peak x the rate at which products run. Prompts, weight transfer, verdicts and what lies between
are left out: they are small where answers are long.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sparrow.calibrate.planning.cost import ByteModel, IntArray, rollout_seconds, trace
from sparrow.calibrate.planning.hardware import Hardware, StepModel
from sparrow.engine.pool import PAGE
from sparrow.models.spec import ModelSpec
from sparrow.schema.base import Record
from sparrow.schema.schedule import Schedule
from sparrow.train.costs import BACKWARD, forward_flops

UTILISATION = 0.30
"""`training_flops` of an update over what the machine could do in its time, with recompute.
Measured with Qwen3-1.7B on an H200: 0.336 with four sequences of 4096 tokens, 0.279 with one of
32768 (bench/2026-11-15-train-h200.json)."""


class Case(NamedTuple):
    """Total lengths of a step's sequences, as assumed; of many, a sample that stands for all."""

    name: str
    lengths: IntArray
    scale: float = 1.0  # sequences of the step, over those of the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is run on the sequences of a step."""

    spec: ModelSpec
    schedule: Schedule | None
    field_bytes: int  # that the schedule's flow keeps with a page and KV head
    item: int  # bytes of a number
    prompt: int
    capacity: int  # tokens of keys and values that fit
    running: int  # sequences at once
    recompute: bool


class StepTime(Record):
    """Seconds of a step, for answers of assumed lengths."""

    case: str
    rollout: float
    dense_rollout: float
    logprobs: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.logprobs + self.update

    @property
    def dense_step(self) -> float:
        return self.dense_rollout + self.logprobs + self.update


def step_times(hardware: Hardware, work: Work, cases: tuple[Case, ...]) -> tuple[StepTime, ...]:
    """Of every case."""
    return tuple(_step_time(hardware, work, case) for case in cases)


def _step_time(hardware: Hardware, work: Work, case: Case) -> StepTime:
    forward = case.scale * pass_seconds(hardware, work.spec, case.lengths)
    passes = 1 + BACKWARD + (1 if work.recompute else 0)
    return StepTime(
        case=case.name,
        rollout=case.scale * _rollout(hardware, work, case.lengths, work.schedule),
        dense_rollout=case.scale * _rollout(hardware, work, case.lengths, None),
        logprobs=forward,
        update=passes * forward,
    )


def pass_seconds(hardware: Hardware, spec: ModelSpec, lengths: IntArray) -> float:
    """One forward pass. Utilisation counts three of the four passes that an update with recompute
    makes, so products run at 4 / 3 of it."""
    rate = hardware.flops_per_s * UTILISATION * (2 + BACKWARD) / (1 + BACKWARD)
    return forward_flops(spec, lengths.tolist()) / rate


def _rollout(hardware: Hardware, work: Work, lengths: IntArray, schedule: Schedule | None) -> float:
    """Both run the same trace: the capacity is that of the plan."""
    over = trace(lengths, prompt=work.prompt, capacity=work.capacity, page=PAGE, most=work.running)
    reads = ByteModel(
        spec=work.spec,
        schedule=schedule,
        itemsize=work.item,
        page=PAGE,
        field_bytes=work.field_bytes,
    )
    return rollout_seconds(over, StepModel(hardware, reads))
