"""The study of landmarks: every flow and configuration of docs/flows.md on the ten texts, at once.

    python bench/flow_study.py TEXTS OUT      TEXTS: what `sparrow flow texts` wrote

Texts are read by processes of their own, side by side on one GPU; what each measured is kept in
OUT, so that a run that was interrupted goes on. At the end the cells of all texts are put together,
and the result is what `sparrow flow score` gives: OUT/flows.json, and OUT/others.json for what it
cannot ask (budgets by layer, mass thresholds with the tokens they kept).
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import flows_tried as tried

from sparrow.calibrate.flows.score import CELLS, Sample, Store, interval, samples, score
from sparrow.calibrate.flows.texts import from_folder
from sparrow.calibrate.replay import acceptances, read
from sparrow.models import load, load_tokenizer
from sparrow.ops.reference import attention as reference
from sparrow.schema.base import to_dict
from sparrow.schema.flow import Configuration
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.flows import Flow, library

MODEL, TOKENS, WORKERS = "smollm2-135m", 8192, 4
reference.QUERY_BLOCK = 1024  # fewer and larger pieces of work; the same up to rounding
NONE_DENSE = Configuration(dense_layers=())
SHIPPED = [
    library.softmax_sum,
    library.softmax_max,
    library.quest,
    library.sub_means(4),
    library.fine_means(4),
    library.fine_means(2),
    library.spread_means(4),
    library.value_gated,
    library.window,
    library.oracle,
]
TRIED = [
    library.fine_means(8),
    library.fine_means(1),
    tried.rotated_means,
    tried.valued_means,
    tried.best_means,
    tried.free_means,
    tried.mean_query_means,
    tried.one_mean,
    tried.eight_bit_means,
]
PLANS: tuple[tuple[str, list[Flow], list[int], Configuration], ...] = (
    ("shipped", SHIPPED, [512, 1024], Configuration()),
    ("tried", TRIED, [512], Configuration()),
    ("none dense", [library.fine_means(4)], [512], NONE_DENSE),
    ("shipped, less", [library.fine_means(4), library.fine_means(2)], [256], Configuration()),
)
# Layers 2 to 9 get more and the others less, about 512 on average.
EARLY = dict.fromkeys(range(2, 10), 768)
OTHERS: tuple[tuple[str, Flow, dict[int, int], int], ...] = (
    ("512 everywhere", library.fine_means(4), {}, 512),
    ("more in layers 2 to 9", library.fine_means(4), EARLY, 400),
    ("block mean, more in layers 2 to 9", library.block_mean, EARLY, 400),
    ("mass 0.9, at most 1024", tried.half_mass, {}, 1024),
    ("mass 0.97, at most 1024", tried.most_mass, {}, 1024),
)


def one_text(text: Sample, out: Path) -> list[dict[str, Any]]:
    """In a process of its own: everything that is measured of one text."""
    torch.set_num_threads(1)
    model = load(MODEL, dtype="float32", device="auto", report=lambda _: None)
    for _, flows, budgets, configuration in PLANS:
        store = Store(out / text.name)
        chosen = {"configuration": configuration, "errors": False}
        score(model, [text], flows, budgets, store=store, **chosen)
    file = out / text.name / "others.json"
    if not file.exists():
        file.write_text(json.dumps(others_of(model, text)))
    return json.loads(file.read_text())


def others_of(model: Any, text: Sample) -> list[dict[str, Any]]:
    dense, rows = read(model, text.ids), []
    for name, flow, layers, budget in OTHERS:
        own = [LayerBudgets(layer=layer, budgets=np.array([b])) for layer, b in layers.items()]
        schedule = Schedule.fixed(budget, flow=flow.name, layers=own)
        with Counted() as counted:
            alpha = acceptances(model, dense, 1, schedule, flow).cpu().numpy()
        p05 = float(np.quantile(alpha, 0.05))
        rows.append({"case": name, "flow": flow.name, "p05": p05, "kept": counted.kept})
    return rows


class Counted:
    """Counts the pages that sparse layers keep, on the way of the definition."""

    def __enter__(self) -> "Counted":
        self.pages, self.choices, self._keep = 0.0, 0, reference.keep_pages
        reference.keep_pages = self._count
        return self

    def __exit__(self, *_: object) -> None:
        reference.keep_pages = self._keep

    def _count(self, *arguments: Any, **named: Any) -> torch.Tensor:
        keep_nGM = self._keep(*arguments, **named)
        self.pages += keep_nGM.sum(2).double().mean(1).sum().item()
        self.choices += len(keep_nGM)
        return keep_nGM

    @property
    def kept(self) -> float:
        """Tokens that a query keeps on average in a sparse layer."""
        return 16 * self.pages / max(1, self.choices)


def main(texts: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    given = samples(load_tokenizer(MODEL), from_folder(texts), TOKENS)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        others = list(pool.map(one_text, given, [out] * len(given)))
    cells = (out / text.name / CELLS for text in given)
    whole = out / "all"
    whole.mkdir(exist_ok=True)
    (whole / CELLS).write_text("".join(file.read_text() for file in cells))
    model = load(MODEL, dtype="float32", device="auto", report=lambda _: None)
    results = {}
    for name, flows, budgets, configuration in PLANS:
        store = Store(whole)
        scores = score(model, given, flows, budgets, store=store, configuration=configuration)
        found = to_dict(scores)
        for row in found["rows"]:
            row.pop("layers")
            figures = (
                f"{row['p05']:.4f}  {row['gain']:+.4f} [{row['gain_low']}, {row['gain_high']}]"
            )
            print(f"{name:14} {row['flow']:18} {row['of_mean']:.3f}x {row['budget']:5} {figures}")
        results[name] = found
    (out / "flows.json").write_text(json.dumps(results, indent=1))
    rows = []
    for at, (name, flow, _, _) in enumerate(OTHERS):
        p05 = np.array([by_text[at]["p05"] for by_text in others])
        kept = float(np.mean([by_text[at]["kept"] for by_text in others]))
        first = np.array([by_text[0]["p05"] for by_text in others])
        row = {"case": name, "flow": flow.name, "kept": kept, "p05_by_text": p05.tolist()}
        rows.append(row | interval("p05", p05) | interval("gain", p05 - first))
        print(f"{name:34} {flow.name:24} kept {kept:6.0f}  p05 {p05.mean():.4f}")
    (out / "others.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
