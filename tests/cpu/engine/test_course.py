"""Which schedule drew which tokens, as completions tell it."""

import numpy as np

from sparrow.engine.course import Course
from sparrow.schema.schedule import Schedule

WIDE = Schedule.fixed(96)


def shares(made: Schedule | None) -> np.ndarray:
    return np.full(6, 1.0 if made is None else made.budget(0) / 100, np.float32)


def test_a_course_joins_what_ran() -> None:
    course = Course(Schedule.fixed(48))
    course.change(2, WIDE)
    course.change(4, None)
    np.testing.assert_allclose(course.join(shares), [0.48, 0.48, 0.96, 0.96, 1, 1])
    narrow, wide = Schedule.fixed(48).describe(), WIDE.describe()
    assert course.describe(10, 6) == f"{narrow}; from length 12: {wide}; from length 14: dense"
    assert course.describe(10, 4) == f"{narrow}; from length 12: {wide}"  # ended before the last
    assert course.describe(10, 0) == narrow


def test_a_course_has_no_stretch_without_a_token() -> None:
    course = Course(None)
    course.change(3, WIDE)
    course.change(3, Schedule.fixed(48))
    assert course.describe(0, 6) == f"dense; from length 3: {Schedule.fixed(48).describe()}"
    course.change(3, None)
    assert course.describe(0, 6) == "dense"
    course.change(4, None)
    assert course.describe(0, 6) == "dense"


def test_a_course_counts_nothing_where_a_part_is_not_counted() -> None:
    course = Course(None)
    course.change(3, WIDE)
    assert course.join(lambda made: None if made is WIDE else np.ones(6, np.float32)) is None


def test_before_a_second_token_nothing_has_been_decoded() -> None:
    course = Course(WIDE)
    course.change(1, None)
    assert course.describe(0, 6) == "dense"
    assert course.dense
    course.change(3, WIDE)
    assert not course.dense
    course.change(5, None)
    assert not course.dense  # what was sparse once is no dense answer
