"""The paper's cost of a rollout: eFLOPs, operations plus intensity times bytes, for comparison.

    eFLOPs = comp + I * mem       I = operations a second over bytes a second (Hardware.intensity)

Two forms of comp and mem, for N samples of one prompt. `printed` is the paper's, term by term (as
in ../shared/reference/method.md, section 5). `consistent` is ours. Symbols, from a ModelSpec:

    P     parameters
    D     numbers of one token's keys and values in all layers: 2 * layers * kv_heads * head_size
    r     query heads of a KV head
    B     budget: tokens that a step attends to
    Lin   tokens of the prompt;   Lout  tokens of each answer

Printed, with 2 bytes a number:

    dense    comp = 2 P N Lout + r (2 Lin + Lout) Lout N D       mem = 2 Lin Lout D + N Lout^2 D
    sparse   comp = 2 P N Lout + 2 r N D B Lout                  mem = 2 N D B Lout
    scoring  comp = 2 N Lin D Lout + r N D Lout^2 / (2 page)     mem = 2 Lin D Lout
                                                                       + N D Lout^2 / (2 page)

Ours sums over steps, at total lengths n from Lin + 1 to Lin + Lout, and layers, with D' the D of
one layer, k the tokens that the layer keeps at n (all of them where it stays dense; first and last
pages and the schedule's budget otherwise) and m = floor(n / page) the landmarks, which are read
where k < n:

    dense    comp = 2 P' N Lout + N sum 2 r D' n      mem = N sum D' n * itemsize
    sparse   comp = 2 P' N Lout + N sum 2 r D' k      mem = N sum D' k * itemsize
    scoring  comp = N sum D' m                        mem = N sum (D' / 2) m * itemsize

What differs: the prompt's part of scoring has its 1 / page, and half the width (a landmark is a key
and no value); scores are of the mean query, so r is not in them; every sample reads the prompt's
pages itself, as kernels do that have a program for each row, where the printed dense form reads
them once for all N (and the printed sparse form does not); the token of a step counts in its
length; P' leaves out an embedding that is only looked up. Like the printed form it leaves out
reading the weights, and what `cost` and `hardware` add to that. numpy and no torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparrow.calibrate.planning.cost import FloatArray
from sparrow.schema.schedule import Schedule

if TYPE_CHECKING:  # that room loads torch
    from sparrow.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations, and bytes read from memory."""

    comp: float
    mem: float

    def eflops(self, intensity: float) -> float:
        return self.comp + intensity * self.mem


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The work of a rollout, dense and sparse; scoring comes on top of sparse."""

    dense: Work
    sparse: Work
    scoring: Work

    def speed_up(self, intensity: float) -> float:
        """Dense over sparse with scoring, in eFLOPs."""
        kept = self.sparse.eflops(intensity) + self.scoring.eflops(intensity)
        return self.dense.eflops(intensity) / kept


def printed(
    spec: "ModelSpec", *, samples: int, prompt: int, output: int, budget: int, page: int = 16
) -> Rollout:
    """The paper's form, with its own prompt terms of scoring."""
    _check(samples, prompt, output)
    if budget < 1 or page < 1:
        raise ValueError(f"eflops: got budget {budget}, page {page}, allowed: 1 and more of each")
    width, ratio = 2 * spec.layers * _layer(spec), spec.heads // spec.kv_heads
    products = 2 * spec.parameters() * samples * output
    square = samples * width * output**2
    attended = 2 * samples * width * budget * output
    shared = 2 * prompt * width * output
    return Rollout(
        dense=Work(
            comp=products + ratio * (2 * prompt + output) * output * samples * width,
            mem=shared + square,
        ),
        sparse=Work(comp=products + ratio * attended, mem=attended),
        scoring=Work(
            comp=samples * shared + ratio * square / (2 * page), mem=shared + square / (2 * page)
        ),
    )


def consistent(
    spec: "ModelSpec",
    schedule: Schedule,
    *,
    samples: int,
    prompt: int,
    output: int,
    itemsize: int = 2,
    field_bytes: int | None = None,
) -> Rollout:
    """Our form: of a schedule, with dense layers, reserved pages and landmarks that are read.

    field_bytes  of the landmark of a page and KV head (default: one mean key); the operations of
                 scoring are those of a mean key either way
    """
    _check(samples, prompt, output)
    lengths = np.arange(prompt + 1, prompt + output + 1)
    kept = [schedule.kept_of_heads(lengths, layer, spec.kv_heads) for layer in range(spec.layers)]
    marks = sum(_landmarks(lengths, own, schedule.page) for own in kept)
    attended, seen = float(np.sum(kept)), spec.layers * float(lengths.sum())
    mark_bytes = spec.head_size * itemsize if field_bytes is None else field_bytes
    return Rollout(
        dense=_attention(spec, samples, output, seen, itemsize),
        sparse=_attention(spec, samples, output, attended, itemsize),
        scoring=Work(
            comp=samples * 2 * _layer(spec) * marks,
            mem=samples * spec.kv_heads * mark_bytes * marks,
        ),
    )


def _attention(spec: "ModelSpec", samples: int, output: int, tokens: float, itemsize: int) -> Work:
    """Products with the weights, and attention to so many tokens in all layers and steps."""
    looked_up = 0 if spec.tied else spec.vocabulary * spec.hidden
    products = 2 * (spec.parameters() - looked_up) * samples * output
    numbers = samples * 2 * _layer(spec) * tokens
    ratio = spec.heads // spec.kv_heads
    return Work(comp=products + 2 * ratio * numbers, mem=numbers * itemsize)


def _landmarks(lengths: np.ndarray, kept: FloatArray, page: int) -> float:
    """Landmarks that one layer reads over these steps: of finished pages, where pages are left."""
    return float(np.where(kept < lengths, lengths // page, 0).sum())


def _layer(spec: "ModelSpec") -> int:
    """Numbers of one token's keys in one layer."""
    return spec.kv_heads * spec.head_size


def _check(samples: int, prompt: int, output: int) -> None:
    if samples < 1 or prompt < 0 or output < 1:
        given = f"{samples} samples, a prompt of {prompt} and answers of {output} tokens"
        raise ValueError(f"eflops: got {given}, allowed: 1 and more, 0 and more, 1 and more")
