"""Studies as `sparrow study` is given them: few arms, and settings that no test has to run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.study.design import Study

Plain = dict[str, Any]
DENSE: Plain = {"name": "dense", "role": "baseline"}
SPARSE: Plain = {"name": "p", "target": 0.86}
TIS: Plain = {"use": "token-tis", "settings": {"cap": 2.0}}


def study(folder: Path, arms: Sequence[Plain] = (DENSE, SPARSE), **changes: Any) -> Study:
    """One of `tiny`, three steps, seeds 0 and 1; `changes` are settings of the whole."""
    train = {"model": {"name": "tiny"}, "gate": {"mode": "warn"}, "run": {"steps": 3}}
    train |= {"data": {"task": "assignments", "length": 100, "first": 100_000}}
    train |= {"algorithm": {"corrections": [TIS]}}
    train |= {"validation": {"every": 1, "rows": 8, "samples": 2}}
    plain = {"name": "s", "out": str(folder), "seeds": [0, 1], "rates": [1e-4, 1e-5]}
    plain |= {"arms": list(arms), "train": train} | changes
    return Study(StudyConfig.model_validate_json(json.dumps(plain)))
