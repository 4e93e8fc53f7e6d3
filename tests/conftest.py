"""Tiers by folder: what stands in tests/<tier>/ gets the marker <tier>.

Every process has one thread (pytest-xdist runs one process per core), also those that tests start.
A parent that ignores SIGINT, such as a shell's background job, does not reach the tests.
"""

import os
import signal
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the machine with a GPU has none; property tests are skipped there
    pass
else:
    settings.register_profile("default", deadline=None, max_examples=40)
    settings.register_profile("thorough", deadline=None, max_examples=1000)
    settings.load_profile("default")

for _threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PROJECT = Path(__file__).parents[1]  # processes that tests start find what pytest's settings find
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(PROJECT), str(PROJECT / "recipes"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

TIERS = ("pure", "cpu", "gpu", "e2e", "browser", "clients")
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(ROOT).parts[0]
        assert tier in TIERS, f"{item.path} stands outside the tiers {TIERS}"
        item.add_marker(tier)
        if tier == "gpu" and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
