"""Which arms are measured on: those between the careful and the bold plan."""

from sparrow.calibrate.deciding import Open, Seen, open_questions


def seen(p05: float, wide: float = 0.01, prompts: int = 48) -> Seen:
    return Seen(p05, p05 - wide, p05 + wide, prompts)


def asked(rows: dict, *targets: float) -> set[tuple[int, int]]:
    return {(one.budget, one.bin) for one in open_questions(rows, targets or (0.86,))}


def test_nothing_is_open_where_every_interval_is_on_one_side() -> None:
    rows = {64: [seen(0.8), seen(0.7)], 128: [seen(0.9), seen(0.89)]}
    assert asked(rows) == set()


def test_a_crossing_interval_below_the_careful_choice_is_open() -> None:
    rows = {64: [seen(0.8)], 128: [seen(0.865)], 256: [seen(0.95)]}
    assert asked(rows) == {(128, 0)}


def test_a_crossing_interval_that_the_plan_does_not_need_is_left_alone() -> None:
    rows = {64: [seen(0.9)], 128: [seen(0.865)]}  # 64 holds already
    assert asked(rows) == set()
    # The first bin forces 128 on all later ones, so 64 does not matter there.
    rows = {64: [seen(0.7), seen(0.865)], 128: [seen(0.9), seen(0.9)]}
    assert asked(rows) == set()


def test_where_nothing_surely_holds_all_crossing_ones_are_open() -> None:
    rows = {64: [seen(0.7)], 128: [seen(0.86)], 256: [seen(0.863)]}
    assert asked(rows) == {(128, 0), (256, 0)}


def test_where_nothing_can_hold_nothing_is_open() -> None:
    assert asked({64: [seen(0.5)], 128: [seen(0.6)]}) == set()


def test_few_prompts_count_as_a_wider_interval_and_are_filled_up_where_they_matter() -> None:
    rows = {64: [seen(0.845, prompts=16)], 128: [seen(0.95, prompts=48)]}
    assert asked(rows) == {(64, 0)}  # 0.845 + 2 * 0.01 reaches 0.86
    rows = {64: [seen(0.7, prompts=16)], 128: [seen(0.95, prompts=16)]}
    assert open_questions(rows, (0.86,)) == [
        Open(budget=128, bin=0, target=0.86, why="few prompts")
    ]


def test_every_target_asks() -> None:
    rows = {64: [seen(0.8)], 128: [seen(0.9)]}
    assert asked(rows, 0.8, 0.9) == {(64, 0), (128, 0)}


def test_bins_without_tokens_ask_nothing() -> None:
    assert asked({64: [None, seen(0.9)], 128: [None, None]}) == set()
    assert open_questions({}, (0.86,)) == []
