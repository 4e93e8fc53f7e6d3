"""Which measure of a run orders the gaps to dense: Spearman's rank correlation, over all arms.

python bench/study_measures.py docs/results/control-study/results.json
"""

import json
import sys
from pathlib import Path

from scipy.stats import spearmanr

MEASURES = {
    "p05, worst bin": lambda cell: cell["worst"]["p05"],
    "p05, all tokens": lambda cell: cell["p05"],
    "p05, entropy > 0.1": lambda cell: cell["p05_uncertain"],
    "k3": lambda cell: cell["k3"],
    "least effective sample size": lambda cell: cell["least_ess"],
}


def main() -> None:
    arms = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["arms"]
    dense = {
        c["seed"]: c["final"] for arm in arms if arm["role"] == "baseline" for c in arm["cells"]
    }
    found = [cell for arm in arms if arm["role"] == "arm" for cell in arm["cells"]]
    cells = [cell | cell.get("measures", {}) for cell in found]  # format 1 has them in the cell
    gaps = [dense[cell["seed"]] - cell["final"] for cell in cells]
    print(f"{len(cells)} runs, gap of final accuracy to dense with the same seed")
    for name, of in MEASURES.items():
        found = spearmanr([of(cell) for cell in cells], gaps).statistic
        print(f"{name:28} {found:+.2f}")


if __name__ == "__main__":
    main()
