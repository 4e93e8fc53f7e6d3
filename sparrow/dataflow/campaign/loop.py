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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sparrow.calibration.flows.grammar import Formula, propose
from sparrow.calibration.flows.statement import statement
from sparrow.calibration.flows.texts import SPLITS, Split
from sparrow.dataflow.campaign.proposals import MOST_ERROR, Json, Proposal, Proposer
from sparrow.files import FolderLock, write_whole
from sparrow.models.sources import locate
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.schema.campaign import (
    BASELINES,
    CAMPAIGN,
    LAST_BASELINE,
    SHIPPED,
    Campaign,
    CampaignRow,
    Candidate,
    FlowLoopConfig,
    FlowPublishConfig,
    Objective,
    SplitScore,
)
from sparrow.schema.types import Progress, Report
from sparrow.tasks.base import keyed_random

FOLDER = "candidates"
PARENTS = 8  # best formulas that the built-in proposer starts from
TRIES = 50  # proposals of a formula that is new
PATIENCE = 3  # proposals in a row that may fail
MOST_OUTPUT = 1 << 16  # bytes that a candidate's process prints

T = TypeVar("T")


class Place(NamedTuple):
    """The processes that measure a candidate."""

    worker: Worker
    timer: Worker | None

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self if worker is not None]


class FlowCampaign:
    """The folder of a campaign, for one process at a time: callers lock it."""

    def __init__(self, config: FlowLoopConfig, report: Report, timer: str) -> None:
        """timer: what makes the handler of a worker that times flows."""
        self.config, self.report = config, report
        self.folder = config.out / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"config": {"settings": config.model_dump_json()}}
        evaluator = "sparrow.dataflow.campaign.evaluator:make_evaluator"
        times = {"device": config.device}
        self.places = [
            Place(
                Worker(evaluator, settings, output=MOST_OUTPUT),
                Worker(timer, times, output=MOST_OUTPUT) if config.times else None,
            )
            for _ in range(config.at_once)
        ]
        self._proposer = Proposer(config) if config.proposer or config.command else None
        self._failed: int | None = None  # proposals in a row that failed; None: none was made yet
        self.worker = self.places[0].worker
        self._start(self.worker)
        about = self.worker.ask({}, config.seconds)
        self.model, self.fingerprint = str(about["model"]), str(about["fingerprint"])
        self.sizes = dict(about["sizes"])
        self.texts = {split: " ".join(digests) for split, digests in about["texts"].items()}
        for note in about["notes"]:
            report(str(note))
        self._check_identity()
        self.candidates = {c.number: c for c in self._read()}
        self._save()

    def close(self) -> None:
        if self._proposer is not None:
            self._proposer.close()
        for place in self.places:
            for worker in place.workers:
                worker.close()

    def _start(self, worker: Worker) -> None:
        """Load the model and the texts, unless that was done; faults of these end the campaign."""
        try:
            worker.wait()
        except WorkerFault as fault:
            worker.kill()
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
        self._baselines()
        first = len(BASELINES)
        numbers = range(first, first + config.candidates)
        left = [number for number in numbers if number not in self.candidates]
        for batch in self._batches(left):
            late = config.minutes is not None and time.monotonic() - began > 60 * config.minutes
            if late:
                self.report(f"{config.minutes:g} minutes are over: the same command goes on")
                break
            self._try(batch)
            self._save()
            if progress is not None:
                progress(self._done(numbers), config.candidates, self._best())
        while promoted := [c for c in self._promoted() if not c.validation]:
            self._measure_split(promoted, "validation")
        return self._save()

    def _done(self, numbers: range) -> int:
        return sum(number in self.candidates for number in numbers)

    def _best(self) -> str:
        best = max(self.scored(), key=self._worth)
        value = getattr(best.search[-1], self.config.objective).value
        return f"best {self.config.objective} on the search texts {value:.3f}: {best.name}"

    def _worth(self, candidate: Candidate) -> float:
        return candidate.worth(self.config.objective)

    def _front(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that no other beats in the objective at no greater cost, best first."""
        return sorted(front_of(candidates, self.config.objective), key=lambda c: -self._worth(c))

    def scored(self) -> list[Candidate]:
        return [c for c in self.candidates.values() if c.status == "scored"]

    def _promoted(self) -> list[Candidate]:
        """The best of the search texts, at their cost or at all: the front, then those behind."""
        left = [c for c in self.scored() if c.number >= len(BASELINES)]
        chosen: list[Candidate] = []
        while left and len(chosen) < self.config.promote:
            front = self._front(left)
            chosen += front[: self.config.promote - len(chosen)]
            left = [c for c in left if c not in front]
        return chosen

    def _baselines(self) -> None:
        """Measure flows that ship on the search and validation texts, unless that was done."""
        new = [
            (Candidate(number=number, name=name, made=SHIPPED, status="scored"), name)
            for number, name in enumerate(BASELINES)
            if number not in self.candidates
        ]
        for batch in self._batches(new):
            for measured in self._measured(batch):
                if measured.status != "scored":
                    raise ValueError(f"{measured.name} cannot be measured: {measured.error}")
                self._record(measured)
        self._measure_split([self.candidates[n] for n in range(len(BASELINES))], "validation")

    def _batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """As many at a time as are measured at once."""
        for begin in range(0, len(items), len(self.places)):
            yield items[begin : begin + len(self.places)]

    def _try(self, numbers: Sequence[int]) -> None:
        """Propose candidates, unless that was done by an interrupted try, and measure them."""
        planned = list[Candidate]()
        for number in numbers:
            file, plan = self._file(number), self._plan(number)
            candidate = _planned(plan) if file.exists() else None
            if candidate is None:
                proposal = self._propose(number, planned)
                if proposal is None:
                    continue
                candidate = proposal.candidate(number)
                write_whole(file, [proposal.source])
                write_whole(plan, [candidate.model_dump_json()])
            planned.append(candidate)
        for candidate in self._measured([(c, self._flow(c)) for c in planned]):
            self._record(candidate)
            self._plan(candidate.number).unlink(missing_ok=True)
        self._restart_workers(planned)

    def _restart_workers(self, measured: Sequence[Candidate]) -> None:
        """Start processes anew that ran code of others, which may have changed what they do."""
        for place, candidate in zip(self.places, measured, strict=False):
            if candidate.genes is None and candidate.number >= len(BASELINES):
                for worker in place.workers:
                    worker.kill()
                    worker.start()

    def _file(self, number: int) -> Any:
        return self.folder / f"{number:04d}.py"

    def _plan(self, number: int) -> Path:
        return self.folder / f"{number:04d}.proposal"

    def _measured(self, flows: Sequence[tuple[Candidate, str]]) -> list[Candidate]:
        """Measure candidates at once, on the search texts; then time them, one after the other."""
        known = {str(c.program): c.number for c in self.scored()}
        with ThreadPoolExecutor(len(self.places)) as threads:
            answers = [*threads.map(partial(self._answer, [*known]), self.places, flows)]
        measured = []
        for place, (candidate, flow), found in zip(self.places, flows, answers, strict=False):
            same = known.get(found.get("program", ""))
            if same is None and "scores" in found and place.timer is not None and found["kernels"]:
                found |= self._ask(place.timer, {"flow": flow})
            measured.append(_candidate(candidate, found, same))
            if measured[-1].status == "scored":
                known[found["program"]] = candidate.number
        return measured

    def _answer(self, known: Sequence[str], place: Place, about: tuple[Candidate, str]) -> Json:
        """What the evaluator says of a candidate; kernels are then there to be timed."""
        began = time.monotonic()
        question = {"flow": about[1], "split": SPLITS[0], "known": known}
        found = self._ask(place.worker, question)
        if place.timer is not None and "scores" in found:
            uncompiled = {"failed": "it does not compile, so it cannot be timed"}
            compiling = {"flow": about[1], "compile": True}
            found |= self._ask(place.timer, compiling) if found["kernels"] else uncompiled
        return found | {"seconds": round(time.monotonic() - began, 3)}

    def _measure_split(self, candidates: Sequence[Candidate], split: Split) -> None:
        """Measure on another split, unless that was done."""
        name = split.replace("-", "_")
        for batch in self._batches([c for c in candidates if not getattr(c, name)]):
            questions = [
                {"flow": self._flow(c), "split": split, "program": c.program} for c in batch
            ]
            workers = [place.worker for place in self.places]
            with ThreadPoolExecutor(len(batch)) as threads:
                answers = [*threads.map(self._ask, workers, questions)]
            for candidate, found in zip(batch, answers, strict=True):
                if "scores" in found:
                    self._record(candidate.replace(**{name: _scores(found)}))
                    continue
                status, why = next(iter(found.items()))
                said = f"candidate {candidate.number} on the {split} texts: {status}: {why}"
                if split == "held-out" or candidate.number < len(BASELINES):
                    raise ValueError(said)
                self.report(f"{said}; it is not promoted")
                self._record(candidate.replace(status=status, error=f"{split} texts: {why}"))
            self._restart_workers(batch)

    def _flow(self, candidate: Candidate) -> str:
        """Where its source is; of a baseline its name."""
        own = candidate.number >= len(BASELINES)
        return str(self._file(candidate.number)) if own else candidate.name

    def publish(self, number: int) -> Candidate:
        """Measure a validated candidate on the held-out texts, which is done once."""
        candidate = self.candidates.get(number)
        if candidate is None or not candidate.validation:
            able = [str(n) for n, c in self.candidates.items() if c.validation]
            raise ValueError(f"candidate {number} was not validated; there are {', '.join(able)}")
        if candidate.held_out:
            self.report(f"candidate {number} was published before: its figures stay")
        baselines = [self.candidates[baseline] for baseline in range(len(BASELINES))]
        self._measure_split([*baselines, candidate], "held-out")
        self._save()
        return self.candidates[number]

    def _ask(self, worker: Worker, question: Json) -> Json:
        """A worker's answer; one that is late, or dies twice, is ended and said."""
        for is_last in (False, True):
            if worker in [place.worker for place in self.places]:
                self._start(worker)
            try:
                return dict(worker.ask(question, self.config.seconds))
            except WorkerFault as fault:
                worker.kill()
                if fault.kind != "ended" or is_last:
                    return {"late" if fault.kind == "late" else "failed": str(fault)[:MOST_ERROR]}
        raise AssertionError

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
            one["source"] = file.read_text(encoding="utf-8") if file.exists() else ""
            if one["number"] < len(BASELINES):
                one["source"] = one["name"]
        return {
            "number": number,
            "settings": settings | {"sizes": self.sizes},
            "candidates": tried,
            "objective": self.config.objective,
            "front": [c.number for c in self._front(self.scored())],
            "language": statement(),
        }

    def _propose(self, number: int, planned: Sequence[Candidate]) -> Proposal | None:
        """A proposal; None: it failed, which is recorded. planned: those of the same round.

        Nothing is recorded if it is the first one, as its program may be wrong, or one too many.
        """
        if self._proposer is None:
            return self._built_in(number, [c.genes for c in planned])
        try:
            proposal = self._proposer.propose(self.state(number))
        except ValueError as error:
            if self._failed is None:
                raise
            self._failed += 1
            if self._failed == PATIENCE:
                raise ValueError(f"{PATIENCE} proposals in a row failed: {error}") from error
            self.report(str(error))
            failed = Candidate(number=number, name="none", status="invalid")
            self._record(failed.replace(error=f"no proposal: {error}"[:MOST_ERROR]))
            return None
        self._failed = 0
        return proposal

    def _built_in(self, number: int, planned: Sequence[Any]) -> Proposal:
        best = self._front(self.scored())
        best += sorted((c for c in self.scored() if c not in best), key=lambda c: -self._worth(c))
        bred = [c for c in best if c.genes is not None][:PARENTS]
        parents = [Formula.model_validate_json(json.dumps(c.genes)) for c in bred]
        numbers = [c.number for c in bred]
        if not parents:  # the best built-in flow, in genes
            parents, numbers = [Formula(spread="number")], [len(BASELINES) - 1]
        rng = keyed_random("flow-loop", self.config.seed, number)
        tried = [*planned, *(c.genes for c in self.candidates.values())]
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
        best = {c.number for c in self._front(self.scored())}
        rows = [self._row(c, c.number in best) for c in self.scored()]
        own = [c for c in self.candidates.values() if c.number >= len(BASELINES)]
        campaign = Campaign(
            model=self.model,
            fingerprint=self.fingerprint,
            texts=self.texts,
            settings=self._settings(),
            objective=self.config.objective,
            tried=len(own),
            statuses=dict(Counter(c.status for c in own)),
            published=sum(bool(c.held_out) for c in own),
            rows=tuple(sorted(rows, key=lambda r: -r.search.worth(self.config.objective))),
        )
        campaign.save(self.config.out / CAMPAIGN)
        return campaign

    def _row(self, candidate: Candidate, front: bool) -> CampaignRow:
        search, validation, held_out = (
            scores[-1] if scores else None
            for scores in (candidate.search, candidate.validation, candidate.held_out)
        )
        assert search is not None
        own = candidate.number >= len(BASELINES)
        survived = _survived(search, held_out, self.config.objective) if own else None
        about: Json = {name: getattr(candidate, name) for name in ABOUT}
        return CampaignRow(
            **about,
            front=front,
            search=search,
            validation=validation,
            held_out=held_out,
            survived=survived,
        )


ABOUT = ("number", "name", "made", "bytes", "of_mean", "microseconds")


def _candidate(candidate: Candidate, found: Json, same: int | None) -> Candidate:
    """A candidate with what was found of it. same: one that has its formula."""
    names = ("program", "bytes", "of_mean", "operations", "kernels", "microseconds", "seconds")
    about = {name: found[name] for name in names if name in found}
    for status in ("invalid", "failed", "late"):
        if status in found:
            why = {"status": status, "error": str(found[status])[:MOST_ERROR]}
            return candidate.replace(**why, seconds=found["seconds"])
    if same is not None:
        return candidate.replace(status="duplicate", error=f"the formula of {same}", **about)
    return candidate.replace(search=_scores(found), **about)


def front_of(candidates: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Those that no other beats in the objective on the search texts or in cost, at no loss."""

    def beats(other: Candidate, one: Candidate) -> bool:
        pairs = [(other.worth(objective), one.worth(objective))]
        pairs += [(-left, -right) for left, right in zip(other.cost, one.cost, strict=True)]
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    return [one for one in candidates if not any(beats(other, one) for other in candidates)]


def _survived(
    search: SplitScore, held_out: SplitScore | None, objective: Objective
) -> float | None:
    """The held-out gain over the last baseline, over that while searching where this is sure."""
    gain = search.above[LAST_BASELINE][objective]
    sure = gain.low is not None and gain.high is not None and gain.low * gain.high > 0
    better = gain.value > 0 if objective != "hard_misses" else gain.value < 0
    if held_out is None or not (sure and better):
        return None
    return held_out.above[LAST_BASELINE][objective].value / gain.value


def _scores(found: Mapping[str, Any]) -> tuple[SplitScore, ...]:
    return tuple(SplitScore.model_validate_json(json.dumps(row)) for row in found["scores"])


def _planned(plan: Path) -> Candidate | None:
    """What an interrupted try wrote down; None if that cannot be read."""
    try:
        return Candidate.model_validate_json(plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_campaign(
    config: FlowLoopConfig, *, progress: Progress | None = None, report: Report, timer: str
) -> Campaign:
    """Run or resume a campaign; only one process may use the folder.

    timer: `module:function` of the worker that times flows, where times are wanted.
    """
    locate(config.model, report=report)  # may download, for which the evaluator has no time
    config.out.mkdir(parents=True, exist_ok=True)
    with (
        closing(FolderLock(config.out, setting="out")),
        closing(FlowCampaign(config, report, timer)) as campaign,
    ):
        return campaign.run(progress)


def publish(config: FlowPublishConfig, *, report: Report, timer: str) -> Candidate:
    """Measure a candidate on the held-out texts."""
    earlier = Campaign.load(config.out / CAMPAIGN)
    own: Json = {
        "objective": earlier.objective,
        "out": str(config.out),
        "device": config.device,
        "seconds": config.seconds,
    }
    loop = FlowLoopConfig.model_validate_json(json.dumps({**earlier.settings, **own}))
    with (
        closing(FolderLock(config.out, setting="out")),
        closing(FlowCampaign(loop, report, timer)) as campaign,
    ):
        return campaign.publish(config.number)
