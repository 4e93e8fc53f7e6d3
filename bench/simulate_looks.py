"""Simulate repeated looks: how often a budget whose true p05 is the target passes.

    PYTHONPATH=. python bench/simulate_looks.py

The p05 of a sample is taken as normal around the target with an error of 1 / sqrt(prompts). A
single look passes if the lower end of its 95 % interval reaches the target. The adaptive rule looks
at 48, 72 and 96 prompts and stops at the first interval that does not cross the target.
"""

import numpy as np

LOOKS = (48, 72, 96)
REPETITIONS = 200_000
WIDTH = 1.96


def main() -> None:
    draws = np.random.default_rng(0).normal(size=(REPETITIONS, LOOKS[-1]))
    sums = draws.cumsum(axis=1)
    z = np.stack([sums[:, n - 1] / np.sqrt(n) for n in LOOKS], axis=1)
    decided = np.abs(z) > WIDTH
    first = np.where(decided.any(axis=1), decided.argmax(axis=1), len(LOOKS) - 1)
    passed = z[np.arange(REPETITIONS), first] > WIDTH
    print(f"one look: {(z[:, -1] > WIDTH).mean():.2%}, looks at {LOOKS}: {passed.mean():.2%}")


if __name__ == "__main__":
    main()
