"""Rows of files, and a reward by import path that is light enough for processes that are killed."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHAT = [{"role": "user", "content": "1 + 1?"}]


def verl(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row as verl has them."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
    }
    return {**row, **changes}


def row_file(file: Path, rows: Sequence[Any]) -> Path:
    """A file with a JSON line for each row."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def odd(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """1 where the words of a text have an odd number of letters; extra_info may name a fault."""
    fault = extra_info.get("fault")
    if fault == "hang":
        time.sleep(600)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise KeyError("no such thing")
    return float(sum(map(len, solution_str.split())) % 2)
