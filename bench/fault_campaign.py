"""The fault campaign: kills, damaged files, absurd settings, hostile rewards.

    python bench/fault_campaign.py --kills 60 --files 500 --settings 300 --rewards 100 --out FILE

Everything is drawn from a seed. A try passes where the product goes on, refuses with one message,
or gives what it gave before; it fails by a traceback, a hang, a process that is left, a value that
changed silently in a file with a digest, or another result after a kill. Exit code 1: some failed.
"""

import argparse
import json
import os
import platform
import sys
import time
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("bench", "tests", "", "recipes")]
os.environ["OMP_NUM_THREADS"], os.environ["PYTHONPATH"] = "1", f"{ROOT}:{ROOT / 'recipes'}"

from faults.outcomes import Try, failures, table  # noqa: E402

PARTS = ("rewards", "settings", "files", "kills")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for part in PARTS:
        parser.add_argument(f"--{part}", type=int, default=0, help="how many tries")
    parser.add_argument("--verb", help="kill this one alone: train, calibrate, study or demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the tries as JSON")
    options = parser.parse_args()
    tries: list[Try] = []
    begun = time.monotonic()
    for part in PARTS:
        count = getattr(options, part)
        if count:
            module = import_module(f"faults.{part}")
            tries += module.run(count, options.seed, options.verb)
    print(table(tries))
    if options.out is not None:
        options.out.write_text(json.dumps(result(tries, options.seed, begun)) + "\n")
    sys.exit(bool(failures(tries)))


def result(tries: list[Try], seed: int, begun: float) -> dict[str, object]:
    return {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "seed": seed,
        "seconds": round(time.monotonic() - begun),
        "tries": [one._asdict() for one in tries],
    }


if __name__ == "__main__":
    main()
