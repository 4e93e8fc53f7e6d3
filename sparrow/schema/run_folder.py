"""Read run directories: of a training, of a calibration, or of both.

    metrics.jsonl, validation.jsonl, actions.jsonl, config.resolved.toml   sparrow train
    schedule.json                                 sparrow train: what the rollout began with
    model/, actor/                                of a run that ended: the policy, and the adapter
                                                  of its sparse actor if that was distilled
    surface.json, plan.json, check.json           sparrow calibrate, sparrow plan
    speed.json                                    sparrow demo: dense beside sparse

A folder with the parts `calibration` and `train`, such as that of the demo, is one run. Errors name
the file. An incomplete last line is ignored: it is being written. NaN and infinities count as not
measured.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from sparrow.files import (
    Json,
    check_digest_line,
    parse_line,
    printable,
    read_lines,
    read_text,
    verify,
)
from sparrow.schema.agents import AgentNode, trees
from sparrow.schema.base import File, Record, Table, from_dict, problems
from sparrow.schema.bench import Speed
from sparrow.schema.plan import PlanFile
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface

PARTS = ("calibration", "train")
METRICS, VALIDATION, ACTIONS = "metrics.jsonl", "validation.jsonl", "actions.jsonl"
SCHEDULE, SETTINGS = "schedule.json", "config.resolved.toml"
ROLLOUTS, MOST_ROLLOUTS = "rollouts", 2**32  # folder, and bytes of one of its files
ADAPTER = "adapter"  # folder of the policy's adapter in PEFT's format, of a run with model.lora
ACTOR = "actor"  # folder of the sparse actor's adapter, beside that of the model
MODEL = "model"  # folder of the trained model of a finished run
DOCUMENTS: dict[str, type[File]] = {
    "surface": Surface,
    "plan": PlanFile,
    "check": Surface,
    "speed": Speed,
}
KNOWN = (METRICS, *(f"{name}.json" for name in DOCUMENTS))
POLICY = "policy/"  # metrics of one of several policies: policy/NAME/...
TIMES = "timing_s/"
POLICY_METRIC = re.compile(rf"{POLICY}([A-Za-z0-9][A-Za-z0-9._-]*)/(?!{TIMES})(.+)")
VERSION = "version"  # of it: updates of a policy that learns
HELD_OUT = "val-core/"
EPISODE = "val-episode/"  # of several policies together
SCORE = "critic/score/mean"
# Settings of a policy that have another name in a run of it alone, and tables that it replaces.
OF_POLICY = {"model": "model.name", "prompts": "rollout.prompts"}
POLICY_PARTS = ("gate.", "rollout.attention.", "rollout.decoding", "algorithm.", "optimiser.")
F = TypeVar("F", bound=File)
Value = TypeVar("Value")
LARGEST = 1e100  # numbers beyond are not measurements


def _measured(value: object) -> object:
    """Map NaN, infinities and absurd numbers (1e999) to None."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value) if abs(value) <= LARGEST else None
    return value


Measured = Annotated[float | None, BeforeValidator(_measured)]
Shown = Annotated[str, AfterValidator(printable)]  # control characters are escaped


class Metrics(Record):
    """The metrics of one step, or of one validation; None: not measured."""

    step: int
    values: Mapping[str, Measured]

    @classmethod
    def from_line(cls, line: Json) -> Self:
        values = {key: value for key, value in line.items() if key != "step"}
        return cls(step=line.get("step"), values=values)  # type: ignore[arg-type]

    def row(self) -> dict[str, Any]:
        return {"step": self.step, **self.values}


def by_policy(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Metrics of each of several policies by its name, as of runs of their own.

    None of a run of one policy. Times are the run's.
    """
    times = {key: value for key, value in values.items() if key.startswith(TIMES)}
    found: dict[str, dict[str, Value]] = {}
    for key, value in values.items():
        if match := POLICY_METRIC.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = value
    return {name: own | times for name, own in found.items()}


class ActionLine(Record):
    """An action of the gate, or a change of settings; other versions may have more fields."""

    model_config = ConfigDict(extra="ignore")

    step: int
    kind: Shown = ""
    reason: Shown = ""

    @classmethod
    def from_line(cls, line: Json) -> Self:
        return cls.model_validate(line)


Line = TypeVar("Line", Metrics, ActionLine)


def read_metrics(file: Path | None) -> list[Metrics]:
    """Read metrics by step; empty without a file, ValueError for a repeated step."""
    lines = _read(file, Metrics)
    for line, later in pairwise(lines):
        if line.step == later.step:
            raise ValueError(f"{file}: duplicate step {later.step}")
    return lines


def _read(file: Path | None, kind: type[Line]) -> list[Line]:
    """Read lines, sorted by step; empty without a file."""
    lines = []
    for number, line in enumerate([] if file is None else read_lines(file, growing=True), 1):
        try:
            lines.append(kind.from_line(line))
        except ValidationError as error:
            raise ValueError(f"{file}, line {number}: {problems(error)}") from None
    return sorted(lines, key=lambda line: line.step)


class RunSettings(Record):
    """The settings of a run that reports read, of this version or another, by dotted names.

    given: all settings; empty if the run has no configuration file.
    """

    model_config = ConfigDict(extra="ignore")

    model: Shown | None = Field(None, alias="model.name")
    seed: int | None = Field(None, alias="run.seed")
    dense: bool = Field(False, alias="rollout.attention.dense")  # of older runs
    decoding: Shown | None = Field(None, alias="rollout.decoding")
    schedule: Shown | None = Field(None, alias="rollout.attention.schedule")
    budget: int | None = Field(None, alias="rollout.attention.budget")
    max_prompt: int | None = Field(None, alias="rollout.max_prompt")
    max_tokens: int | None = Field(None, alias="rollout.max_tokens")
    gate: Shown | None = Field(None, alias="gate.mode")
    target: float | None = Field(None, alias="gate.target")
    window: int | None = Field(None, alias="gate.window")
    hard_misses: float | None = Field(None, alias="gate.hard_misses")
    max_kl: float | None = Field(None, alias="gate.max_kl")
    given: Mapping[str, Any] = Field(default_factory=dict)

    def _check(self) -> None:
        read = [str(field.alias) for field in type(self).model_fields.values()]
        for name, value in self.given.items():
            is_section = any(key.startswith(f"{name}.") for key in read)
            self.require(not is_section, "given", f"a table {name}", str(value)[:80])

    def of_policy(self, name: str) -> Self:
        """Those of one of several policies, as of a run with it alone."""
        prefix = f"policies.{name}."
        own = {k.removeprefix(prefix): v for k, v in self.given.items() if k.startswith(prefix)}
        own = {OF_POLICY.get(key, key): value for key, value in own.items()}
        replaced = {part for part in POLICY_PARTS if any(key.startswith(part) for key in own)}
        kept = {
            key: value
            for key, value in self.given.items()
            if not key.startswith(("policies.", *replaced))
        }
        settings = {**kept, **own}
        return type(self).model_validate({**settings, "given": settings})


def read_settings(file: Path | None) -> RunSettings:
    """Read the resolved configuration of a run."""
    if file is None:
        return RunSettings.model_validate({})
    text = read_text(file)
    try:
        check_digest_line(text)
        settings = dict(flat_settings(tomllib.loads(text)))
        return RunSettings.model_validate({**settings, "given": settings})
    except ValidationError as error:
        raise ValueError(f"{file}: {problems(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: invalid TOML: {error}") from error


def flat_settings(values: Mapping[str, Any], above: str = "") -> Sequence[tuple[str, Any]]:
    """Flatten nested settings to dotted names; control characters are escaped."""
    settings: list[tuple[str, Any]] = []
    for name, value in values.items():
        dotted = above + printable(name)
        if isinstance(value, Mapping):
            settings += flat_settings(value, f"{dotted}.")
        else:
            settings.append((dotted, printable(value) if isinstance(value, str) else value))
    return settings


class Outcomes(NamedTuple):
    """Shares of answers that are right, cut off at the token limit, or wrong; they add up to 1."""

    right: float
    cut_off: float
    wrong: float

    @classmethod
    def from_metrics(cls, values: Mapping[str, float | None], source: str) -> Self | None:
        """Of a validation; runs of older versions have accuracy and the share cut off alone."""
        shares = [values.get(f"{HELD_OUT}{source}/{name}") for name in cls._fields]
        if None not in shares:
            return cls._make(share for share in shares if share is not None)
        means = (values[key] for key in values if key.startswith(f"{HELD_OUT}{source}/acc/mean@"))
        right, cut_off = next(means, None), values.get(f"val-aux/{source}/cut_off")
        if right is None or cut_off is None or not 0 <= right <= 1:
            return None
        wrong = max(0.0, 1 - right - cut_off)
        return cls(right, 1 - right - wrong, wrong)  # cut off and right counts as right


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Accuracy on held-out rows after a step, with its interval."""

    step: int
    value: float
    low: float
    high: float
    outcomes: Outcomes | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The content of a run directory; parts that it does not have are empty."""

    name: str
    number: int = 0  # among runs that are compared
    steps: Sequence[Metrics] = ()
    validation: Sequence[Metrics] = ()
    actions: Sequence[ActionLine] = ()
    settings: RunSettings
    schedule: Schedule | None = None
    surface: Surface | None = None
    plan: PlanFile | None = None
    check: Surface | None = None
    speed: Speed | None = None
    trees: Sequence[tuple[AgentNode, ...]] = ()  # of agents, in the rollouts that were saved last
    policies: Mapping[str, "RunFolder"] = field(default_factory=dict)  # of several, as runs

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Return the steps that have a metric, with its values."""
        pairs = ((line.step, line.values.get(metric)) for line in self.steps)
        return [(step, value) for step, value in pairs if value is not None]

    def minutes(self) -> dict[int, float]:
        """Return the minutes of training until the end of each step; of 0 steps, 0."""
        minutes, so_far = {0: 0.0}, 0.0
        for line in self.steps:
            so_far += max(0.0, line.values.get("timing_s/step") or 0.0) / 60
            minutes[line.step + 1] = so_far
        return minutes

    def held_out(self) -> list[HeldOut]:
        """Return the validation accuracy by step, of the first source."""
        accuracies = []
        for line in self.validation:
            means = [key for key in line.values if key.startswith(HELD_OUT) and "/mean@" in key]
            value = line.values[means[0]] if means else None
            if value is not None:
                stem = means[0].rpartition("/mean@")[0]
                source = stem.removeprefix(HELD_OUT).removesuffix("/acc")
                low, high = (line.values.get(f"{stem}/{end}") for end in ("low", "high"))
                low, high = (value if end is None else end for end in (low, high))
                outcomes = Outcomes.from_metrics(line.values, source)
                accuracies.append(
                    HeldOut(step=line.step, value=value, low=low, high=high, outcomes=outcomes)
                )
        return accuracies

    def in_episode(self, metric: str) -> list[tuple[int, float, float, float]]:
        """Return steps with a metric of the held-out episode, of the first source: mean, low, high.

        metric: acc or reward of a policy, team_reward of all.
        """
        found = []
        for line in self.validation:
            means = [
                k for k in line.values if k.startswith(EPISODE) and k.endswith(f"/{metric}/mean")
            ]
            value = line.values[means[0]] if means else None
            if value is not None:
                ends = (
                    line.values.get(means[0].removesuffix("mean") + end) for end in ("low", "high")
                )
                low, high = (value if end is None else end for end in ends)
                found.append((line.step, value, low, high))
        return found

    @property
    def dense(self) -> bool:
        """Whether the settings say that rollouts were dense; False without settings."""
        attention = self.settings
        sparse = attention.schedule or attention.budget
        dense = attention.dense or attention.decoding == "dense"
        return bool(attention.given) and (dense or not sparse)

    @property
    def longest(self) -> int | None:
        """Most tokens of a sequence by the settings."""
        prompt, answer = self.settings.max_prompt, self.settings.max_tokens
        return None if prompt is None or answer is None else prompt + answer

    @property
    def target(self) -> float | None:
        """The target of p05: that of the gate, or of the plan."""
        settings = self.settings
        if self.steps and settings.gate != "off" and settings.target is not None:
            return settings.target
        if self.plan is not None:
            return self.plan.target
        return self.surface.targets[0] if self.surface and self.surface.targets else None


class TrainResult(Table, Record):
    """The result of `sparrow train`: its folder, the trained model, the metrics of its steps."""

    title: ClassVar[str] = "{0.folder}, {0.summary}"
    shown: ClassVar[str] = "metrics"

    folder: Path
    model: Path  # a Hugging Face folder
    metrics: tuple[Metrics, ...]  # of each step
    validation: tuple[Metrics, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what a run has written; the model is there once the run has ended."""
        return cls(
            folder=folder,
            model=folder / MODEL,
            metrics=tuple(read_metrics(_first([folder], METRICS))),
            validation=tuple(read_metrics(_first([folder], VALIDATION))),
        )

    @property
    def summary(self) -> str:
        """The mean reward of the first and the last step."""
        scores = [line.values.get(SCORE) for line in self.metrics]
        measured = [f"{score:.3f}" for score in scores if score is not None]
        return f"reward {measured[0]} to {measured[-1]}" if measured else "no step"


def read_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Read several run directories, with distinct names."""
    places = [Path(folder) for folder in folders]
    whole = [place.resolve() for place in places]
    for place, resolved in zip(places, whole, strict=True):
        if whole.count(resolved) > 1:
            raise ValueError(f"report: duplicate folder {place}")
    named = zip(places, _names(whole), strict=True)
    return [read_run(place, name, number) for number, (place, name) in enumerate(named)]


def split_policies(runs: Sequence[RunFolder], *, frozen: bool = False) -> list[RunFolder]:
    """Runs of several policies as one run for each that learns, or for all; others as they are."""
    if not any(run.policies for run in runs):
        return list(runs)
    several, parts = len(runs) > 1, list[tuple[RunFolder, bool]]()
    for run in runs:
        for part in [*run.policies.values()] or [run]:
            name = f"{run.name}: {part.name}" if several and run.policies else part.name
            shown = frozen or not run.policies or bool(part.values(VERSION))
            parts.append((replace(part, name=name, number=len(parts)), shown))
    return [part for part, shown in parts if shown]


def read_run(folder: Path, name: str | None = None, number: int = 0) -> RunFolder:
    """Read a run directory; ValueError if the folder is not one."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a run directory")
    places = [folder, *(folder / part for part in PARTS)]
    if not any(os.path.lexists(place / known) for place in places for known in KNOWN):
        raise ValueError(
            f"{folder} is not a run directory: it has none of {', '.join(KNOWN)} "
            f"(nor have its folders {' and '.join(PARTS)})"
        )
    for place in places:
        verify(place, (METRICS, VALIDATION, ACTIONS, SCHEDULE, SETTINGS))
    documents = {key: _loaded(places, f"{key}.json", kind) for key, kind in DOCUMENTS.items()}
    trained = [place for place in places if os.path.lexists(place / METRICS)]
    schedule = _loaded(trained, SCHEDULE, Schedule)  # of the training, else of the plan
    if schedule is None and isinstance(documents["plan"], PlanFile):
        schedule = documents["plan"].schedule
    run = RunFolder(
        name=printable(name or folder.resolve().name),
        number=number,
        steps=read_metrics(_first(places, METRICS)),
        validation=read_metrics(_first(places, VALIDATION)),
        actions=_read(_first(places, ACTIONS), ActionLine),
        settings=read_settings(_first(places, SETTINGS)),
        schedule=schedule,
        trees=read_trees(trained[0]) if trained else (),
        **documents,  # type: ignore[arg-type]
    )
    return replace(run, policies=_policies(run))


def _policies(run: RunFolder) -> dict[str, RunFolder]:
    """Each of several policies, as a run of its own."""
    steps, held = ([by_policy(li.values) for li in part] for part in (run.steps, run.validation))

    def part(name: str) -> RunFolder:
        def own(lines: Sequence[Metrics], values: Sequence[Mapping[str, Any]]) -> list[Metrics]:
            return [
                line.model_copy(update={"values": found.get(name, {})})
                for line, found in zip(lines, values, strict=True)
            ]

        return RunFolder(
            name=name,
            number=run.number,
            steps=own(run.steps, steps),
            validation=own(run.validation, held),
            actions=[act for act in run.actions if act.reason.startswith(f"policy {name}: ")],
            settings=run.settings.of_policy(name),
        )

    return {name: part(name) for name in dict.fromkeys(n for line in (*steps, *held) for n in line)}


def read_trees(folder: Path) -> list[tuple[AgentNode, ...]]:
    """Records of the trees of agents in the rollouts that were saved last; roots first."""
    files = sorted((folder / ROLLOUTS).glob("step_*.jsonl"))
    text = read_text(files[-1], most=MOST_ROLLOUTS) if files else ""
    found = list[tuple[AgentNode, ...]]()
    for number, line in enumerate(text.splitlines(), 1):
        if '"agents":[{' in line:
            try:
                nodes = [from_dict(AgentNode, node) for node in parse_line(line)["agents"]]
            except (ValueError, TypeError) as error:
                raise ValueError(f"{files[-1]}, line {number}: {error}") from error
            found += trees(nodes)
    return found


def training_folder(folder: Path) -> Path:
    """The folder of a training run: this one, or its part `train`; ValueError if it is none."""
    for place in (folder, folder / PARTS[1]):
        if os.path.lexists(place / METRICS):
            return place
    raise ValueError(f"{folder} is not a run directory of sparrow train: it has no {METRICS}")


def _names(places: Sequence[Path]) -> list[str]:
    """Return the shortest last parts of paths that are distinct."""
    for count in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return list(map(str, places))


def _first(places: Sequence[Path], file: str) -> Path | None:
    return next((place / file for place in places if os.path.lexists(place / file)), None)


def _loaded(places: Sequence[Path], file: str, kind: type[F]) -> F | None:
    path = _first(places, file)
    return None if path is None else kind.load(path)
