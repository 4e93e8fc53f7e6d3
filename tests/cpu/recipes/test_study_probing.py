"""p05 by bin from readings that were made by hand."""

import numpy as np
import pytest

pytest.importorskip("pydantic")

from sparrow.schema.gate import Reading
from sparrow_recipes.study.probing import bins_of


def reading(
    prompt: str, start: int, alpha: list[float], entropy: list[float] | float = 1.0
) -> Reading:
    lengths = start + np.arange(len(alpha))
    return Reading(
        prompt=prompt, lengths=lengths, alpha=alpha, entropy=np.broadcast_to(entropy, len(alpha))
    )


def test_p05_of_a_bin_by_hand() -> None:
    """0.00 to 1.00 in hundredths: p05 is 0.05; unsure are the first 21: 0.00 to 0.20, 0.01."""
    alpha = [i / 100 for i in range(101)]
    entropy = [0.2] * 21 + [0.1] * 80  # 0.1 is not above 0.1
    (found,) = bins_of((reading("a", 100, alpha, entropy),), 128 * 2)
    assert (found["start"], found["stop"]) == (0, 256)
    assert (found["tokens"], found["prompts"], found["uncertain"]) == (101, 1, 21)
    assert found["p05"] == pytest.approx(0.05)
    assert found["p05_uncertain"] == pytest.approx(0.01)
    assert found["low"] <= found["p05"] <= found["high"]


def test_tokens_go_where_their_lengths_are_and_prompts_are_counted_once() -> None:
    """150 tokens at 50 to 199 in bins of 100: 50 below 100 of each of four readings."""
    readings = tuple(reading(name, 50, [1.0] * 50 + [0.5] * 100) for name in "aabc")
    low, high = bins_of(readings, 100)
    assert (low["start"], low["stop"], low["tokens"], low["prompts"]) == (0, 100, 200, 3)
    assert (high["start"], high["tokens"], high["prompts"]) == (100, 400, 3)
    assert (low["p05"], high["p05"]) == (1.0, 0.5)


def test_a_bin_of_few_tokens_is_not_told() -> None:
    """100 are enough, 99 are not; an empty bin between others is none."""
    readings = (reading("a", 0, [1.0] * 99), reading("b", 200, [0.9] * 100))
    (found,) = bins_of(readings, 100)
    assert (found["start"], found["tokens"]) == (200, 100)


def test_no_unsure_token_has_no_tail() -> None:
    (found,) = bins_of((reading("a", 0, [1.0] * 100, 0.0),), 100)
    assert (found["uncertain"], found["p05_uncertain"]) == (0, None)


def test_nothing_was_decoded() -> None:
    assert bins_of((), 100) == []
    assert bins_of((reading("a", 0, []),), 100) == []
