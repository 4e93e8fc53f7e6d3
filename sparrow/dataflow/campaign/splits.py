"""The texts of a campaign: to search with, to validate with, and held out."""

from sparrow.calibration.flows.score import TokenizedText
from sparrow.calibration.flows.texts import SPLITS, Split, Text, from_folder, standard
from sparrow.schema.campaign import FlowLoopConfig
from sparrow.schema.types import Report
from sparrow.tasks.choosing import find_puzzle

APART = 1_000_000  # seeds between the chains of two splits


def texts_of(config: FlowLoopConfig, split: Split, report: Report) -> list[Text]:
    """The texts of a split; no text is in two."""
    if config.task is not None:
        return _chains(config.task, config, SPLITS.index(split))
    if config.texts is None:
        return standard(report, split)
    return from_folder(config.texts / split)


def apart(found: dict[Split, list[TokenizedText]]) -> dict[Split, list[TokenizedText]]:
    """The texts of all splits; ValueError if two splits have one whose tokens are the same."""
    seen = dict[str, str]()
    for split, texts in found.items():
        for text in texts:
            if seen.setdefault(text.sha256, split) != split:
                there = f"the text {text.name} of {split} is in {seen[text.sha256]} too"
                raise ValueError(f"{there}; splits must not share texts")
    return found


def _chains(task: str, config: FlowLoopConfig, place: int) -> list[Text]:
    """Puzzles with their gold chains of thought."""
    family = find_puzzle(task)
    first = (1 + place) * APART
    rows = [family.row(first + number, config.length) for number in range(config.count)]
    return [
        Text(f"{task}-{first + number}", "puzzle", f"{row.prompt} {family.chain(row, 1)}")
        for number, row in enumerate(rows)
    ]
