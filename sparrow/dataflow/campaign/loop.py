"""A campaign: candidates are proposed, checked, scored, recorded; the best are validated.

    candidates/0007.py     a flow, and beside it
    candidates/0007.json   what came out of it
    cells.jsonl            figures by content: nothing is measured twice
    campaign.json          the leaderboard, with how many were tried

Selection is honest: proposers see figures of the search texts alone. Of what scores best there,
`promote` are measured on the validation texts; the held-out ones are read when an entry is
published, once. Candidates run in a process that is ended when it is late; a proposal of others
gets one of its own.
"""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sparrow import functions
from sparrow.calibration.flows.grammar import Formula, propose
from sparrow.calibration.flows.statement import statement
from sparrow.calibration.flows.texts import SPLITS, Split
from sparrow.files import FolderLock, write_whole
from sparrow.models.sources import locate
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.schema.campaign import (
    BASELINES,
    CAMPAIGN,
    SHIPPED,
    Campaign,
    CampaignRow,
    Candidate,
    FlowLoopConfig,
    FlowPublishConfig,
    SplitScore,
)
from sparrow.schema.types import Progress, Report
from sparrow.tasks.base import keyed_random

FOLDER = "candidates"
PARENTS = 8  # best formulas that the built-in proposer starts from
TRIES = 50  # proposals of a formula that is new
MOST_SOURCE = 1 << 16  # characters of a proposal
LAST = "spread_means(4)"  # what gains are told over
MOST_ERROR = 500  # characters of an error that are kept

Json = dict[str, Any]
Propose = Callable[[Json], Json]


class Proposal(NamedTuple):
    """A flow's file, where it comes from, and its genes if it is of the built-in proposer."""

    source: str
    name: str
    parents: tuple[int, ...] = ()
    made: str = ""
    genes: Json | None = None

    def candidate(self, number: int) -> Candidate:
        about = self._asdict()
        del about["source"]
        return Candidate(number=number, status="scored", **about)


class FlowCampaign:
    """The folder of a campaign, for one process at a time: callers lock it."""

    def __init__(self, config: FlowLoopConfig, report: Report) -> None:
        self.config, self.report = config, report
        self.folder = config.out / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.worker = Worker(
            "sparrow.dataflow.campaign.evaluator:make_evaluator",
            {"config": {"settings": config.model_dump_json()}},
        )
        self._start()
        about = self.worker.ask({}, config.seconds)
        self.model, self.fingerprint = str(about["model"]), str(about["fingerprint"])
        self.texts = {split: " ".join(digests) for split, digests in about["texts"].items()}
        for note in about["notes"]:
            report(str(note))
        self._check_identity()
        self.candidates = {c.number: c for c in self._read()}
        self._save()

    def close(self) -> None:
        self.worker.close()

    def _start(self) -> None:
        """Load the model and the texts, unless that was done; faults of these end the campaign."""
        try:
            self.worker.wait()
        except WorkerFault as fault:
            self.worker.kill()
            raise ValueError(f"the model or its texts cannot be loaded: {fault}") from fault

    def _check_identity(self) -> None:
        """Refuse a folder whose figures are of another model, other texts or settings."""
        place = self.config.out / CAMPAIGN
        if not place.exists():
            if any(self.folder.glob("*.json")):
                raise ValueError(f"{self.config.out} has candidates, but no {CAMPAIGN}")
            return
        earlier, now = Campaign.load(place), self._settings()
        changed = [key for key in now if earlier.settings.get(key) != now[key]]
        changed += ["weights"] if earlier.fingerprint != self.fingerprint else []
        changed += ["texts"] if dict(earlier.texts) != self.texts else []
        if changed:
            other = f"is a campaign with another {', '.join(dict.fromkeys(changed))}"
            raise ValueError(f"{self.config.out} {other}: choose another folder")

    def _settings(self) -> Json:
        return dict(json.loads(json.dumps(self.config.identity)))

    def _read(self) -> Iterator[Candidate]:
        for file in sorted(self.folder.glob("*.json")):
            yield Candidate.load(file)

    # Rounds.

    def run(self, progress: Progress | None) -> Campaign:
        """Propose and measure until there are enough, then validate the best."""
        config, began = self.config, time.monotonic()
        for number, name in enumerate(BASELINES):
            self._baseline(number, name)
        first = len(BASELINES)
        for number in range(first, first + config.candidates):
            late = config.minutes is not None and time.monotonic() - began > 60 * config.minutes
            if late:
                self.report(f"{config.minutes:g} minutes are over: the same command goes on")
                break
            if number not in self.candidates:
                self._try(number)
                self._save()
            if progress is not None:
                progress(number - first + 1, config.candidates, self._best())
        for candidate in self._promoted():
            self._measure_split(candidate, "validation")
        return self._save()

    def _best(self) -> str:
        best = max(self.scored(), key=lambda c: c.worth)
        return f"best p05 on the search texts {best.worth:.3f}: {best.name}"

    def scored(self) -> list[Candidate]:
        return [c for c in self.candidates.values() if c.status == "scored"]

    def _promoted(self) -> list[Candidate]:
        """The best of the search texts, in few bytes or at all: the front, then those behind it."""
        left = [c for c in self.scored() if c.number >= len(BASELINES)]
        chosen: list[Candidate] = []
        while left and len(chosen) < self.config.promote:
            front = sorted(front_of(left), key=lambda c: -c.worth)
            chosen += front[: self.config.promote - len(chosen)]
            left = [c for c in left if c not in front]
        return chosen

    def _baseline(self, number: int, name: str) -> None:
        """Measure a flow that ships on the search and validation texts, unless that was done."""
        if number not in self.candidates:
            candidate = Candidate(number=number, name=name, made=SHIPPED, status="scored")
            measured = self._measured(candidate, name)
            if measured.status != "scored":
                raise ValueError(f"{name} cannot be measured: {measured.error}")
            self._record(measured)
        self._measure_split(self.candidates[number], "validation")

    def _try(self, number: int) -> None:
        """Propose a candidate, unless that was done by an interrupted try, and measure it."""
        file, plan = self._file(number), self.folder / f"{number:04d}.proposal"
        candidate = _planned(plan) if file.exists() else None
        if candidate is None:
            proposal = self._propose(number)
            candidate = proposal.candidate(number)
            write_whole(file, [proposal.source])
            write_whole(plan, [candidate.model_dump_json()])
        self._record(self._measured(candidate, str(file)))
        plan.unlink(missing_ok=True)
        if candidate.genes is None:  # code of others may have changed what the process does
            self.worker.kill()

    def _file(self, number: int) -> Any:
        return self.folder / f"{number:04d}.py"

    def _measured(self, candidate: Candidate, flow: str) -> Candidate:
        known = {c.program: c.number for c in self.scored()}
        began = time.monotonic()
        question = {"flow": flow, "split": SPLITS[0], "known": [*known]}
        found = self._ask(question)
        seconds = {"seconds": round(time.monotonic() - began, 3)}
        for status in ("invalid", "failed", "late"):
            if status in found:
                error = str(found[status])[:MOST_ERROR]
                return candidate.replace(status=status, error=error, **seconds)
        names = ("program", "bytes", "of_mean", "operations", "kernels")
        about = {name: found[name] for name in names} | seconds
        if "scores" not in found:
            same = f"the formula of {known[found['program']]}"
            return candidate.replace(status="duplicate", error=same, **about)
        return candidate.replace(search=_scores(found), **about)

    def _measure_split(self, candidate: Candidate, split: Split) -> Candidate:
        """Measure on another split, unless that was done."""
        name = split.replace("-", "_")
        if getattr(candidate, name):
            return candidate
        source = candidate.name
        if candidate.number >= len(BASELINES):
            source = str(self._file(candidate.number))
        question = {"flow": source, "split": split, "program": candidate.program}
        found = self._ask(question)
        if "scores" not in found:
            why = next(iter(found.values()))
            raise ValueError(f"candidate {candidate.number} on the {split} texts: {why}")
        return self._record(candidate.replace(**{name: _scores(found)}))

    def publish(self, number: int) -> Candidate:
        """Measure a validated candidate on the held-out texts, which is done once."""
        candidate = self.candidates.get(number)
        if candidate is None or not candidate.validation:
            able = [str(n) for n, c in self.candidates.items() if c.validation]
            raise ValueError(f"candidate {number} was not validated; there are {', '.join(able)}")
        if candidate.held_out:
            self.report(f"candidate {number} was published before: its figures stay")
        for baseline in range(len(BASELINES)):
            self._measure_split(self.candidates[baseline], "held-out")
        published = self._measure_split(candidate, "held-out")
        self._save()
        return published

    def _ask(self, question: Json) -> Json:
        """The evaluator's answer; one that is late, or dies, is ended and said."""
        self._start()
        try:
            return dict(self.worker.ask(question, self.config.seconds))
        except WorkerFault as fault:
            self.worker.kill()
            kind = "late" if fault.kind == "late" else "failed"
            return {kind: str(fault)[:MOST_ERROR]}

    def _record(self, candidate: Candidate) -> Candidate:
        candidate.save(self.folder / f"{candidate.number:04d}.json")
        self.candidates[candidate.number] = candidate
        return candidate

    # Proposals.

    def state(self, number: int) -> Json:
        """What a proposer may know: figures of the search texts, none of the others."""
        hidden = {"validation", "held_out", "format"}
        settings = {k: value for k, value in self._settings().items() if k != "texts"}
        tried = [c.model_dump(mode="json", exclude=hidden) for c in self.candidates.values()]
        for one in tried:
            file = self._file(one["number"])
            one["source"] = file.read_text(encoding="utf-8") if file.exists() else one["name"]
        return {
            "number": number,
            "settings": settings,
            "candidates": tried,
            "front": [c.number for c in front_of(self.scored())],
            "language": statement(),
        }

    def _propose(self, number: int) -> Proposal:
        config = self.config
        if config.command is None and config.proposer is None:
            return self._built_in(number)
        state = self.state(number)
        try:
            if config.command is not None:
                return _given(_answer_of(config.command, state, config.seconds), number)
            function = functions.resolve(str(config.proposer), "proposer")
            return _given(function(state), number)
        except Exception as error:  # whatever the code of others raises
            text = f"the proposer failed on candidate {number}: {type(error).__name__}: {error}"
            raise ValueError(text) from error

    def _built_in(self, number: int) -> Proposal:
        best = sorted(front_of(self.scored()), key=lambda c: -c.worth)
        best += sorted((c for c in self.scored() if c not in best), key=lambda c: -c.worth)
        bred = [c for c in best if c.genes is not None][:PARENTS]
        parents = [Formula.model_validate_json(json.dumps(c.genes)) for c in bred]
        numbers = [c.number for c in bred]
        if not parents:  # the best built-in flow, in genes
            parents, numbers = [Formula(spread="number")], [BASELINES.index(LAST)]
        rng = keyed_random("flow-loop", self.config.seed, number)
        tried = [c.genes for c in self.candidates.values()]
        for _ in range(TRIES):
            formula, places, made = propose(parents, rng)
            genes = formula.model_dump(mode="json")
            if genes not in tried:
                break
        name = f"loop-{number}"
        above = tuple(numbers[place] for place in places)
        return Proposal(formula.source(name), name, above, made, genes)

    # What came out.

    def _save(self) -> Campaign:
        best = {c.number for c in front_of(self.scored())}
        rows = [self._row(c, c.number in best) for c in self.scored()]
        own = [c for c in self.candidates.values() if c.number >= len(BASELINES)]
        campaign = Campaign(
            model=self.model,
            fingerprint=self.fingerprint,
            texts=self.texts,
            settings=self._settings(),
            tried=len(own),
            statuses=dict(Counter(c.status for c in own)),
            published=sum(bool(c.held_out) for c in own),
            rows=tuple(sorted(rows, key=lambda row: -row.search)),
        )
        campaign.save(self.config.out / CAMPAIGN)
        return campaign

    def _row(self, candidate: Candidate, front: bool) -> CampaignRow:
        searched, held_out = _gain(candidate.search), _gain(candidate.held_out)
        survived = None
        is_own = candidate.number >= len(BASELINES)
        is_sure = all((score.above[LAST].low or 0.0) > 0 for score in candidate.search)
        if is_own and is_sure and searched and held_out is not None:
            survived = held_out / searched
        return CampaignRow(
            **{name: getattr(candidate, name) for name in CampaignRow.model_fields.keys() & ABOUT},
            front=front,
            search=candidate.worth,
            validation=_mean(candidate.validation),
            held_out=_mean(candidate.held_out),
            survived=survived,
        )


ABOUT = {"number", "name", "made", "bytes", "of_mean"}


def front_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in p05 on the search texts or in bytes, at no loss in the other."""
    return [
        one
        for one in candidates
        if not any(
            other.worth >= one.worth
            and (other.bytes or 0) <= (one.bytes or 0)
            and (other.worth, other.bytes) != (one.worth, one.bytes)
            for other in candidates
        )
    ]


def _mean(scores: Sequence[SplitScore]) -> float | None:
    return fmean(score.p05 for score in scores) if scores else None


def _gain(scores: Sequence[SplitScore]) -> float | None:
    """Mean over budgets of the p05 above that of the last baseline."""
    return fmean(score.above[LAST].mean for score in scores) if scores else None


def _scores(found: Mapping[str, Any]) -> tuple[SplitScore, ...]:
    return tuple(SplitScore.model_validate_json(json.dumps(row)) for row in found["scores"])


def _given(answer: Any, number: int) -> Proposal:
    """The proposal of a function or command: a source, or {"source", "name", "parents", "made"}."""
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError as error:
            raise ValueError(f"the proposer's JSON cannot be read: {error}") from error
    given = {"source": answer} if isinstance(answer, str) else dict(answer)
    source = given.get("source")
    if not isinstance(source, str) or not 0 < len(source) <= MOST_SOURCE:
        raise ValueError(f"a proposer gives the source of a flow, up to {MOST_SOURCE} characters")
    parents = [p for p in given.get("parents") or () if type(p) is int]
    name = str(given.get("name") or f"proposal-{number}")[:100]
    return Proposal(source, name, tuple(parents), str(given.get("made", ""))[:1000])


def _answer_of(command: str, state: Json, seconds: float) -> str:
    """What a program of a proposer writes; with all it started it is ended when it is late."""
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(json.dumps(state), timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise ValueError(f"it ended with {process.returncode}: {errors[-MOST_ERROR:]}")
    return said


def _planned(plan: Path) -> Candidate | None:
    """What an interrupted try wrote down; None if that cannot be read."""
    try:
        return Candidate.model_validate_json(plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_campaign(
    config: FlowLoopConfig, *, progress: Progress | None = None, report: Report
) -> Campaign:
    """Run or resume a campaign; only one process may use the folder."""
    locate(config.model, report=report)  # may download, for which the evaluator has no time
    config.out.mkdir(parents=True, exist_ok=True)
    with (
        closing(FolderLock(config.out, setting="out")),
        closing(FlowCampaign(config, report)) as campaign,
    ):
        return campaign.run(progress)


def publish(config: FlowPublishConfig, *, report: Report) -> Candidate:
    """Measure a candidate on the held-out texts."""
    settings = Campaign.load(config.out / CAMPAIGN).settings
    own = {"out": str(config.out), "device": config.device, "seconds": config.seconds}
    loop = FlowLoopConfig.model_validate_json(json.dumps({**settings, **own}))
    with (
        closing(FolderLock(config.out, setting="out")),
        closing(FlowCampaign(loop, report)) as campaign,
    ):
        return campaign.publish(config.number)
