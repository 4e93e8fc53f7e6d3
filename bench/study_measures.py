"""Spearman rank correlation of measures of a run with its gap to dense, over all arms.

python bench/study_measures.py docs/results/control-study/results.json
"""

import json
import sys
from pathlib import Path

from scipy.stats import spearmanr

MEASURES = {
    "p05, all tokens": "p05",
    "p05, entropy > 0.1": "p05_uncertain",
    "k3": "k3",
    "least effective sample size": "least_ess",
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
    values = {name: [cell[key] for cell in cells] for name, key in MEASURES.items()}
    for name, own in {"p05, worst bin": [c["worst"]["p05"] for c in cells], **values}.items():
        print(f"{name:28} {spearmanr(own, gaps).statistic:+.2f}")


if __name__ == "__main__":
    main()
