"""What the gate says to people: bins, budgets, and where the tail is."""

from sparrow.gate.watch import Watch
from sparrow.schema.gate import BinLook
from sparrow.schema.schedule import DENSE
from sparrow.schema.train import GateConfig


def bin_words(start: int, stop: int | None) -> str:
    """Lengths of a bin."""
    return f"lengths {start} on" if stop is None else f"lengths {start} to {stop - 1}"


def budget_words(budget: int) -> str:
    return "all" if budget == DENSE else str(budget)


def tail_words(bin: BinLook, watch: Watch, config: GateConfig) -> str:
    """Where p05 of a judged bin is, from what, and how that lies to the target."""
    p05, low, high = bin.tail
    if high < config.target:
        verdict = f"surely below the target {config.target:g}"
    elif p05 < config.target:
        looks = f"{watch.below} look{'s' if watch.below > 1 else ''} in a row"
        verdict = f"below the target {config.target:g} at {looks}"
    else:
        verdict = f"more than {config.slack:g} above the target {config.target:g}"
    return (
        f"p05 of acceptance at {bin_words(bin.start, bin.stop)} is {p05:.4f} "
        f"({low:.4f} to {high:.4f}; {bin.tokens} tokens of {bin.prompts} prompts), "
        f"{verdict}"
    )
