"""The benchmark of decode attention runs and reports what it promises."""

import json

import pytest
from rich.console import Console

pytest.importorskip("numba")
from sparrow.bench import decode_attention
from sparrow.schema.base import to_dict


def test_a_short_run() -> None:
    seen: list[str] = []
    result = decode_attention.run(
        models=("smollm2-135m",), dtypes=("fp32",), rounds=1, pool_bytes=0, progress=seen.append
    )
    assert seen == ["smollm2-135m fp32"]
    json.dumps(to_dict(result))
    speeds = {row["case"]: row["gb_per_s"] for row in result["rows"]}
    plain = max(speed for case, speed in speeds.items() if case.startswith("read"))
    assert {"attention, dense", "attention, kept 1/4", "reference"} <= speeds.keys()
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / plain)
    Console(file=None, quiet=True).print(decode_attention.table(result))
