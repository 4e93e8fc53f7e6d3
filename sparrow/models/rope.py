"""Rotary positions: the frequencies of plain, linear, Llama 3 and YaRN rope.

Frequencies are computed in double precision by the published formulas. Other kinds (dynamic,
longrope, ...) depend on the running length or on tables of their own and are refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate")}
_LEAST, _MOST = 1e-6, 1e15


@dataclass(frozen=True, slots=True)
class Rope:
    """theta, the kind of scaling, and its parameters as sorted (name, value) pairs."""

    theta: float = 10_000.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _NEEDED:
            raise ValueError(
                f"rope scaling {self.kind!r:.80} is not supported; supported are {sorted(_NEEDED)}"
            )
        _check_number("rope_theta", self.theta, 1)
        given = dict(self.scaling)
        for name in _NEEDED[self.kind]:
            if given.get(name) is None:
                raise ValueError(f"rope scaling {self.kind!r} lacks {name}")
        for name, value in self.scaling:
            if name not in (*_NEEDED[self.kind], *_OPTIONAL.get(self.kind, ())):
                raise ValueError(f"rope scaling {self.kind!r} with {name} is not supported")
            if name != "truncate":
                _check_number(f"rope_scaling.{name}", value, _LEAST)
            elif not isinstance(value, bool):
                raise ValueError(f"rope_scaling.{name} must be true or false, got {value!r:.80}")
        if self.kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
            raise ValueError("rope low_freq_factor must be below high_freq_factor")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Rope":
        """Read either form: `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling`."""
        given = _table(config, "rope_parameters") or _table(config, "rope_scaling")
        theta = given.pop("rope_theta", None)
        theta = config.get("rope_theta") if theta is None else theta
        theta = 10_000.0 if theta is None else theta
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        if kind == "yarn" and given.get("original_max_position_embeddings") is None:
            given["original_max_position_embeddings"] = config.get("max_position_embeddings")
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("partial_rotary_factor", 1.0) == 1.0:
            given.pop("partial_rotary_factor", None)
        return cls(theta=theta, kind=kind, scaling=tuple(sorted(given.items())))

    def to_hf(self) -> dict[str, Any]:
        """Config keys that transformers 4 and 5 both read."""
        scaling = {"rope_type": self.kind, **dict(self.scaling)}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
        }

    def frequencies(self, head_size: int) -> tuple[list[float], float]:
        """Radians per position of each channel pair, and the factor on cosine and sine."""
        plain = [self.theta ** (-2 * i / head_size) for i in range(head_size // 2)]
        scaling = dict(self.scaling)
        if self.kind == "linear":
            return [f / scaling["factor"] for f in plain], 1.0
        if self.kind == "llama3":
            return [_llama3(f, **scaling) for f in plain], 1.0
        if self.kind == "yarn":
            return _yarn(plain, self.theta, head_size, scaling)
        return plain, 1.0


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key} must be a table of keys, got {value!r:.80}")
    return dict(value or {})


def _check_number(name: str, value: Any, least: float) -> None:
    """Within bounds between which frequencies stay finite."""
    if type(value) not in (int, float) or not least < value <= _MOST:
        raise ValueError(
            f"{name} must be a number above {least:g} and at most {_MOST:g}, got {value!r:.80}"
        )


def _llama3(
    frequency: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> float:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    turns = original_max_position_embeddings * frequency / (2 * math.pi)
    if turns > high_freq_factor:
        return frequency
    if turns < low_freq_factor:
        return frequency / factor
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - kept) * frequency / factor + kept * frequency


def _yarn(
    plain: list[float], theta: float, head_size: int, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """Channels turning more than beta_fast times in the trained length are kept, those below
    beta_slow are stretched by `factor`, a linear ramp between."""
    factor = scaling["factor"]

    def channel(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return head_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(scaling.get("beta_fast") or 32)
    high = channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = max(high - low, 0.001)
    stretch = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain))]
    blended = [f / factor * s + f * (1 - s) for f, s in zip(plain, stretch, strict=True)]
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return blended, magnitude
