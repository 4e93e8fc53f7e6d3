"""A reward by import path, light enough for processes that are killed and started again."""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any


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
