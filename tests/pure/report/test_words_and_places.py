"""Labels that do not overlap, the axis of lengths, and sentences that follow the data."""

import math
from typing import Any

import numpy as np
import pytest
from support.surfaces import cell, plan, surface

from sparrow.report.cell_plots import beta_density, telling_line
from sparrow.report.labels import every, lengths_text, spread, thousands
from sparrow.report.lengths import Lengths, lengths_of
from sparrow.report.plan_plots import cost_title, schedule_title, speed_ups
from sparrow.report.surface_words import (
    describe,
    layers_text,
    means_title,
    note,
    subtitle,
    tails_title,
)


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([0.9, 0.1, 0.5], [1, 1, 1], 0.1, 0, 1) == pytest.approx([0.9, 0.1, 0.5])


def test_labels_that_touch_move_apart_around_their_middle() -> None:
    assert spread([0.5, 0.5, 0.8], [1, 1, 1], 0.1, 0, 1) == pytest.approx([0.45, 0.55, 0.8])


def test_a_label_that_holds_stays_and_the_others_move() -> None:
    low, high = spread([0.5, 0.5], [1, 99], 0.1, 0, 1)
    assert high == pytest.approx(0.501)
    assert low == pytest.approx(0.401)


def test_labels_stay_within_the_panel() -> None:
    assert spread([1, 1, 0.99], [1, 1, 1], 0.1, 0, 1) == pytest.approx([0.9, 1.0, 0.8])
    assert spread([0, 0.02], [1, 1], 0.1, 0, 1) == pytest.approx([0, 0.1])


def test_without_room_the_gaps_shrink() -> None:
    assert sorted(spread([0.5] * 5, [1] * 5, 0.4, 0, 1)) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert spread([], [], 0.1, 0, 1) == []


@pytest.mark.parametrize("seed", range(5))
def test_spread_labels_keep_order_and_gap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted, holds = rng.random(15), rng.choice([1.0, 50.0], 15)
    places = np.array(spread(list(wanted), list(holds), 0.06, 0, 1))
    assert np.diff(places[np.argsort(wanted)]).min() >= 0.06 - 1e-9
    assert places.min() >= -1e-9
    assert places.max() <= 1 + 1e-9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (950, "950"), (999.6, "1K"), (1000, "1K"), (1234, "1.2K"), (9960, "10K")],
        *[(12_345, "12K"), (999_600, "1M"), (3_400_000, "3.4M")],
    ],
)
def test_counts_have_few_digits(value: float, text: str) -> None:
    assert thousands(value) == text


def test_lengths_are_in_thousands_only_if_all_are() -> None:
    assert lengths_text([0, 2000, 12_000]) == ["0", "2K", "12K"]
    assert lengths_text([0, 500, 1000]) == ["0", "500", "1000"]


def test_every_nth_place_gets_its_room() -> None:
    assert [every(count, 6.0, 0.5) for count in (1, 12, 13, 25)] == [1, 1, 2, 3]


def test_even_bins_make_a_plain_axis() -> None:
    lengths = Lengths((0, 1000, 2000, 4000))
    assert [lengths.place(at) for at in (0, 1000, 4000)] == pytest.approx([0, 0.75, 3])
    assert lengths.middle({"start": 2000, "stop": 4000}) == pytest.approx(2.25)


def test_uneven_bins_are_equally_wide() -> None:
    lengths = Lengths((0, 64, 128, 1024))
    assert [lengths.place(at) for at in (64, 576, 1024)] == pytest.approx([1, 2.5, 3])


def test_a_bin_without_an_end_is_as_wide_as_the_one_before() -> None:
    lengths = lengths_of([{"start": 0, "stop": 500}, {"start": 500, "stop": None}])
    assert (lengths.edges, lengths.open_end) == ((0, 500, 1000), True)
    assert lengths.middle({"start": 500, "stop": None}) == pytest.approx(1.5)
    assert lengths.place(10**6) == pytest.approx(2)


def row(*tails: float, budget: int = 64) -> list[dict[str, Any]]:
    ends = [(i * 100, (i + 1) * 100) for i in range(len(tails))]
    return [cell("v", budget, *end, p05=p05) for end, p05 in zip(ends, tails, strict=True)]


@pytest.mark.parametrize(
    ("cells", "title"),
    [
        (row(0.9, 0.8), "p05 of acceptance falls with length"),
        (row(0.8, 0.9), "p05 of acceptance rises with length"),
        (row(0.9, 0.895), "p05 of acceptance hardly changes with length"),
        (row(0.9), "p05 of acceptance at one length"),
        (
            row(0.9, 0.8) + row(0.95, 0.9, budget=128),
            "p05 of acceptance falls with length; more kept tokens hold it up",
        ),
    ],
)
def test_the_title_says_what_the_tail_does(cells: list[dict[str, Any]], title: str) -> None:
    assert tails_title(cells) == title


def test_the_title_of_means_compares_the_lowest_of_both() -> None:
    apart = [cell("v", 64, 0, 100, mean=0.97, p05=0.5), cell("v", 64, 100, 200, mean=0.98, p05=0.6)]
    assert "p05 falls to 0.50, the mean stays at 0.97" in means_title(apart)
    assert "the same" in means_title([cell("v", 64, 0, 100, mean=0.971, p05=0.97)])


def test_the_subtitle_names_model_flow_dtype_and_prompts() -> None:
    words = subtitle(surface(), ["block_mean"])
    for part in ("qwen3-1.7b", "block_mean", "pages of 16", "bfloat16", "60 prompts"):
        assert part in words
    assert "2 variants" in subtitle(surface(names=("a", "b")), ["a", "b"])


def test_few_prompts_are_said() -> None:
    few = surface()
    for made in few["cells"]:
        made["prompts"] = 12
    assert "Fewer than 48 prompts" in note(few)
    assert "Fewer" not in note(surface())


def test_layers_in_words() -> None:
    assert [layers_text(x) for x in ([3], [4, 5, 6], [0, 5])] == [
        "layer 3",
        "layers 4-6",
        "layers 0, 5",
    ]
    assert describe(surface(), "block_mean").endswith("dense layers 0-1")


def test_the_title_of_a_schedule_follows_its_bins() -> None:
    assert schedule_title(plan()) == "256 to 768 kept tokens hold p05 at 0.86 or above"
    assert schedule_title(plan(1)) == "256 kept tokens hold p05 at 0.86 or above"
    assert schedule_title(plan(dense_from=1)).endswith("the other lengths stay dense")
    assert schedule_title(plan(dense_from=0)).startswith("No measured budget keeps")
    below = plan()
    below["bins"][1]["p05"] = 0.85
    assert schedule_title(below).endswith("p05 is below 0.86 in 1 of 3 bins")


def test_the_title_of_costs_has_seconds_and_ratios() -> None:
    made = plan(1, speed_up=2.0, limit=3.0)
    made["bins"][0] |= {"seconds": 61.25, "dense_seconds": 122.5}
    title = cost_title(made)
    assert (
        title == "The rollout takes 61.2 s instead of 122 s, 2.00x; bytes alone would allow 3.00x"
    )


def test_speed_ups_leave_out_what_was_not_reached() -> None:
    made = plan(compare={"name": "preset", "starts": [0], "budgets": [512], "speed_up": 1.9})
    made["sensitivity"][2]["speed_up"] = None
    own, lower, preset, *models = [name for name, _, _ in speed_ups(made)]
    assert (own, lower, preset) == ("this plan, target 0.86", "target 0.84", "preset")
    assert models == ["bytes alone", "the paper's eFLOPs"]


def test_beta_densities_are_of_the_scaled_distribution() -> None:
    x = np.array([0.2, 0.5])
    assert beta_density(x, 1, 1) == pytest.approx([1 / 0.999] * 2)
    assert beta_density(x, 2, 1) == pytest.approx(2 * x / 0.999**2)
    fine = np.linspace(1e-6, 0.999 - 1e-6, 20_001)
    assert math.isclose(np.trapezoid(beta_density(fine, 3, 2), fine), 1, rel_tol=1e-4)


def test_the_telling_line_is_nearest_to_the_target() -> None:
    made = surface(targets=[0.9])
    made["cells"] = row(0.7, 0.72) + row(0.89, 0.92, budget=128) + row(0.99, budget=256)
    assert [c["budget"] for c in telling_line(made, "v")] == [128, 128]
    assert telling_line(made, "other") == []
