"""What titles, subtitles and notes of a surface's figures say: sentences that follow the data."""

from collections.abc import Sequence

import numpy as np

from sparrow.report.panels import Plain

MOST_PANELS = 4
MOST_LETTERS = 100
LEAST_PROMPTS = 48
CHANGE = 0.01
"""What a title calls a change of p05."""


def tails_title(cells: Sequence[Plain]) -> str:
    """How p05 changes with length and with the budget."""
    falls, rises = _change(cells, along="start"), _change(cells, along="budget")
    if falls is None:
        first = "p05 of acceptance at one length"
    elif abs(falls) < CHANGE:
        first = "p05 of acceptance hardly changes with length"
    else:
        first = f"p05 of acceptance {'falls' if falls < 0 else 'rises'} with length"
    held = rises is not None and rises >= CHANGE
    return f"{first}; more kept tokens hold it up" if held else first


def means_title(cells: Sequence[Plain]) -> str:
    """How far the mean stays above the tail."""
    mean, tail = (min(cell[key] for cell in cells) for key in ("mean", "p05"))
    if mean - tail < CHANGE:
        return f"Mean and tail tell the same: neither falls below {tail:.2f}"
    return f"The mean hides the tail: where p05 falls to {tail:.2f}, the mean stays at {mean:.2f}"


def _change(cells: Sequence[Plain], along: str) -> float | None:
    """p05 at a line's end minus p05 at its start, on average over lines of two cells or more."""
    line = "budget" if along == "start" else "start"
    found: dict[tuple[str, int | None], list[Plain]] = {}
    known = [cell for cell in cells if cell["budget"] is not None or along == "start"]
    for cell in sorted(known, key=lambda cell: cell[along]):
        found.setdefault((cell["variant"], cell[line]), []).append(cell)
    changes = [row[-1]["p05"] - row[0]["p05"] for row in found.values() if len(row) > 1]
    return float(np.mean(changes)) if changes else None


def variants_of(surface: Plain) -> list[str]:
    """Variants with cells, as many as fit on a page."""
    used = list(dict.fromkeys(cell["variant"] for cell in surface["cells"]))
    return used[:MOST_PANELS]


def budgets_of(surface: Plain) -> list[int | None]:
    """Budgets with cells, from few tokens to many; None, a whole schedule, at the end."""
    used = {cell["budget"] for cell in surface["cells"]}
    return sorted(used, key=lambda budget: (budget is None, budget))


def budget_text(budget: int | None) -> str:
    return "schedule" if budget is None else str(budget)


def describe(surface: Plain, name: str) -> str:
    """A variant in words: its name, page, dense layers."""
    words = [name]
    for variant in surface["variants"]:
        if variant["name"] == name:
            words.append(f"pages of {variant['page']}")
            if variant["dense_layers"]:
                words.append(f"dense {layers_text(variant['dense_layers'])}")
    return " · ".join(words)


def layers_text(layers: Sequence[int]) -> str:
    """layer 3, layers 4-7, layers 0, 5, 9."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def subtitle(surface: Plain, names: Sequence[str]) -> str:
    """Model, flow, dtype, prompts."""
    flows = describe(surface, names[0]) if len(names) == 1 else f"{len(names)} variants"
    prompts = max(cell["prompts"] for cell in surface["cells"])
    how = "generated from" if surface["mode"] == "generated" else "given tokens of"
    return (
        f"{surface['model']} · {flows} · {surface['dtype']} · "
        f"{how} {_short(surface['prompts'])} · {prompts} prompts"
    )


def note(surface: Plain, *, bars: bool = True) -> str:
    """How to read lines, bands and bars, and what to doubt."""
    words = ["Bands: 95 % intervals of p05 over prompts."]
    if bars:
        words.append("Grey bars: tokens measured in a bin, for one budget.")
        if surface["floor"]:
            words.append(f"Dotted: dense against dense in {surface['dtype']}.")
    left_out = len({cell["variant"] for cell in surface["cells"]}) - MOST_PANELS
    if left_out > 0:
        words.append(f"{left_out} more variants are in the file.")
    if max(cell["prompts"] for cell in surface["cells"]) < LEAST_PROMPTS:
        words.append(f"Fewer than {LEAST_PROMPTS} prompts: the true intervals are wider.")
    return " ".join(words)


def _short(text: str) -> str:
    """Where prompts came from, as far as a subtitle has room for it."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
