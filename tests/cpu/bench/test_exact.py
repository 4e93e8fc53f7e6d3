"""The benchmark of exact decoding: verdicts are imposed, and complete runs end as rounds say."""

from typing import Any

import pytest
from support.results import check_output
from support.specs import TINY as SPEC

from sparrow.benchmarks import exact

CASE = (3, 512, "fixed-64-all")


@pytest.mark.parametrize(("acceptance", "tokens"), [(1.0, 5), (0.0, 1)])
@pytest.mark.parametrize(("reselect", "weights"), [(1, "model"), (3, "model"), (1, "int8")])
def test_imposed_acceptance(acceptance: float, tokens: int, reselect: int, weights: Any) -> None:
    how: dict[str, Any] = {"draft_tokens": 4, "reselect": reselect, "weights": weights}
    how |= {"acceptance": (acceptance,), "rounds": 2}
    result = exact.run(model=SPEC, dtype="fp32", cases=[CASE], **how)
    (row,) = result.rows
    assert row.tokens_per_round == tokens
    assert row.speed_up == pytest.approx(tokens * row.ms_dense / row.ms_round)
    assert min(row.ms_draft, row.ms_verify) > 0
    assert not result.runs
    check_output(result)


@pytest.mark.parametrize(
    ("case", "how", "problem"),
    [
        ((2, 256, None), {}, "schedule"),
        ((2, 100, "fixed-64-all"), {}, "context"),
        ((2, 512, "fixed-64-all"), {"draft_tokens": 17}, "draft_tokens"),
        ((2, 10**6, "fixed-64-all"), {}, "positions"),
        ((65, 512, "fixed-64-all"), {"weights": "int8"}, "64 rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(case, how, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        exact.run(model=SPEC, dtype="fp32", cases=[case], **how)


def test_drafts_that_begin_pages_have_them() -> None:
    """Two rows of 256 tokens: drafts that are timed alone cross the end of a page."""
    (row,) = exact.run(model=SPEC, dtype="fp32", cases=[(2, 256, "fixed-64-all")], rounds=1).rows
    assert row.ms_verify > 0


def test_by_position_and_to_the_end() -> None:
    """The first draft is accepted, the second is not: two tokens a round."""
    how = {"draft_tokens": 3, "acceptance": (1.0, 0.0), "rounds": 2, "compare": "fixed-96"}
    result = exact.run(model=SPEC, dtype="fp32", cases=[CASE], new_tokens=21, **how)
    assert result.rows[0].tokens_per_round == 2
    assert result.rows[0].speed_up_sparse > 0
    dense, speculative = result.runs
    assert (dense.who, dense.speed_up, speculative.who) == ("dense", 1.0, "exact")
    for run in result.runs:
        assert run.ratio == pytest.approx(run.seconds / run.expected)
        assert run.tokens_per_s == pytest.approx(3 * 21 / run.seconds)
