"""An axis in pixels: limits that follow the data, round ticks, numbers as people write them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparrow.report.page import Axis

STEPS = (1.0, 2.0, 5.0, 10.0)
BRIEF = ("g", ".0f")  # forms without digits behind the point: large ticks become 20K, 3M
MINUS = "\N{MINUS SIGN}"
FINEST = 1e-9  # of the limits' size: below it, values count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from low to high on pixels from start to stop, which may run either way."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def written(value: float, form: str) -> str:
    """A value by its format specification, with a true minus sign and no minus zero."""
    text = format(value, form)
    if not any(digit in text for digit in "123456789"):
        text = text.removeprefix("-")
    return text.replace("-", MINUS)


def between(low: float, high: float, form: str) -> str:
    """An interval behind its value."""
    return f" ({written(low, form)} to {written(high, form)})"


def tick_texts(values: Sequence[float], form: str) -> list[str]:
    """The ticks' labels: by the axis's form, in thousands or millions where they are large."""
    most = max((abs(value) for value in values), default=0.0)
    if form not in BRIEF or most < 1e4:
        texts = [written(value, form) for value in values]
        while all("." in text and text[-1] in "0." for text in texts) and texts:
            texts = [text[:-1] for text in texts]  # 0.90 and 0.80 as 0.9 and 0.8
        return texts
    unit, name = (1e6, "M") if most >= 1e6 else (1e3, "K")
    return [written(value / unit, "g") + name if value else "0" for value in values]


def limits(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The axis's limits; those it leaves open follow the values, and are never the same."""
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if high - low > FINEST * max(abs(low), abs(high)):
        return low, high
    room = 0.1 * abs(low) or 1.0
    if axis.low is not None:
        return low, low + room
    if axis.high is not None:
        return high - room, high
    return (low - room, low + room) if low else (0.0, 1.0)


def tick_step(low: float, high: float, count: int, form: str) -> float:
    """The least round step that gives at most so many intervals, and ticks the form can write."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    for scale in range(20):
        for step in STEPS:
            wide = step * power * 10.0**scale
            if (high - low) / wide <= count * (1 + FINEST) and _writable(wide, form):
                return wide
    return high - low  # no round step can be written: the ends alone


def _writable(step: float, form: str) -> bool:
    """Whether the form shows a step without rounding: 0.5 as ".0f" would read 0 and 2.5 as 2."""
    text = written(step, form).replace(MINUS, "-").replace(",", "").replace("_", "")
    try:
        shown = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return True  # a form of its own kind, such as hexadecimal
    return math.isclose(shown, step, rel_tol=1e-6)


def ticks(low: float, high: float, count: int, axis: Axis) -> list[float]:
    """Round values from low to high, some `count` of them; doublings on a logarithmic axis."""
    if axis.log:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return [2.0**power for power in powers[:: max(1, -(-len(powers) // count))]]
    step = tick_step(low, high, count, axis.form)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [_clean(rank * step) for rank in range(first, last + 1)]


def rounded_out(low: float, high: float, axis: Axis, count: int) -> tuple[float, float]:
    """Limits moved outwards to the next ticks where the axis leaves them open."""
    step = tick_step(low, high, count, axis.form)
    if axis.low is None:
        low = _clean(math.floor(low / step + 1e-6) * step)
    if axis.high is None:
        high = _clean(math.ceil(high / step - 1e-6) * step)
    return low, high


def _clean(value: float) -> float:
    """0.30000000000000004 as 0.3."""
    return float(f"{value:.12g}")
