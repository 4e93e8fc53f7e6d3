"""The curves of docs/train.md and docs/code.md, from the raw files beside this script.

python bench/plot_training.py
"""

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from sparrow.reporting.page import Chart, Section
from sparrow.reporting.render import svg_file
from sparrow.reporting.training import kept_section, learning_section, tail_section
from sparrow.schema.run_folder import RunFolder, RunSettings, read_metrics

HERE = Path(__file__).parent
OUT = HERE.parent / "docs/results/training"
CODE = HERE / "2026-11-18-code-rl-h200.tar.gz"
DAY = "2026-11-15-train-small"
SHOWN = ("reward-by-step", "accuracy-by-step", "answer-length", "tail-worst")


def run(number: int, name: str, kind: str) -> RunFolder:
    metrics, held_out = (HERE / f"{DAY}-{kind}{what}-h200.jsonl" for what in ("", "-validation"))
    settings = RunSettings.model_validate({"gate.target": 0.86})
    steps, validation = read_metrics(metrics), read_metrics(held_out)
    return RunFolder(
        name=name, number=number, steps=steps, validation=validation, settings=settings
    )


def curves() -> Section:
    runs = [run(0, "dense", "dense"), run(1, "sparse, 0.86", "sparse")]
    parts = [learning_section(runs), kept_section(runs), tail_section(runs)]
    items = [item for part in parts if part for item in part.items if item.key in SHOWN]
    return Section(
        key="small",
        title="small learns puzzles with dense and with sparse rollout",
        say="assignments of length 2000, GRPO with token TIS, one H200, one seed each. "
        "Commands: docs/log.md.",
        items=[item for item in items if isinstance(item, Chart)],
    )


def code_curves() -> Section:
    """Runs in an archive: a folder each."""
    runs = list[RunFolder]()
    with TemporaryDirectory() as folder, tarfile.open(CODE) as archive:
        archive.extractall(folder, filter="data")
        for number, name in enumerate(("dense-0", "exact-0", "dense-1", "exact-1")):
            place = Path(folder, "rate-3e-5", name)
            steps, held_out = (
                read_metrics(place / f"{n}.jsonl") for n in ("metrics", "validation")
            )
            settings = RunSettings.model_validate({})
            given = {"steps": steps, "validation": held_out, "settings": settings}
            kind, seed = name.split("-")
            runs.append(RunFolder(name=f"{kind}, seed {seed}", number=number, **given))
    section = learning_section(runs)
    assert section is not None
    return Section(
        key="code",
        title="SmolLM2-135M learns to program, with dense and with exact rollout",
        say="Problems of two or three steps with hidden tests, GRPO, rate 3e-5, one H200. "
        "Commands: docs/code.md.",
        items=[item for item in section.items if item.key in SHOWN[:2]],
    )


if __name__ == "__main__":
    for name, section in (("small", curves()), ("code", code_curves())):
        file = OUT / f"{name}.svg"
        file.write_text(svg_file(section), encoding="utf-8")
        print(file)
