"""`sparrow audit`: prove from the files of a run that every prompt ended exactly once.

The ledger proves itself; other files of the run must agree with it: a batch for every step in
metrics.jsonl and none beyond, batches of the right size, and in the saved rollouts of a step the
prompts of its batch, no token older than the staleness allows. A run may go on meanwhile: its
metrics are read before and after the ledger.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sparrow.dataflow.asynchronous.ledger_file import UsedPrompts, open_ledger
from sparrow.dataflow.asynchronous.prompt_ledger import TAKEN_AGAIN, LedgerAudit
from sparrow.dataflow.run_files import (
    left_out_rows,
    read_rollouts,
    rollout_steps,
    saved_step,
)
from sparrow.files import expanded, has_sums, lock_holder, printable
from sparrow.schema.agents import LEVEL, AgentNode, audit_tree, trees
from sparrow.schema.asynchronous import PROMPTS, AuditResult
from sparrow.schema.episode import Group
from sparrow.schema.loading import read_resolved
from sparrow.schema.run_folder import METRICS, Metrics, read_metrics, training_folder
from sparrow.schema.simulation import fresh_groups
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import Examples
from sparrow.tasks.choosing import open_rows
from sparrow.tasks.rows import FileRows

NAMED = 5  # steps or prompts that a problem lists
LONGEST = 80  # characters of a reason or a name
STALENESS = "async/staleness_max"


class RunProgress(NamedTuple):
    """How far a run is. It may go on while its files are read."""

    steps: tuple[Metrics, ...]  # in metrics.jsonl
    taken: int  # steps at least
    begun: int  # steps at most: a batch is recorded before it is learnt

    def until(self, step: int) -> "RunProgress":
        return RunProgress(tuple(line for line in self.steps if line.step < step), step, step)


@dataclass
class _Rollouts:
    """What the saved rollouts of a run say."""

    compared: int = 0
    trees: int = 0  # of agents
    oldest: int | None = None
    problems: list[str] = field(default_factory=list)

    def audit_trees(self, step: int, groups: Sequence[Group], config: TrainConfig | None) -> None:
        """Whether every agent ended once, within the limits of the run, and said what is saved."""
        rollout = None if config is None else config.rollout
        for group in groups:
            found = trees(node for t in group.trajectories for node in t.agents)
            self.trees += len(found)
            where = f"rollouts of step {step}, prompt {printable(group.prompt_id)[:LONGEST]}"
            for tree in found:
                problems = audit_tree(tree, None if rollout is None else rollout.agents)
                play = f"{where}, play {tree[0].node[0]}"
                self.problems += [f"{play}: {problem}" for problem in problems]
            self.problems += [f"{where}: {text}" for text in _unlike_records(group, found)]
            if found and rollout is not None and len(found) != rollout.samples:
                self.problems.append(f"{where}: {len(found)} trees of {rollout.samples} plays")


def audit(folder: Path, *, rollouts: bool = True) -> AuditResult:
    """Audit an asynchronous run; ValueError if it is none, or its ledger is damaged."""
    folder = training_folder(folder)
    file = folder / PROMPTS
    if not file.exists():
        return _audit_trees(folder, rollouts)
    running = lock_holder(folder) is not None
    before, saved = _steps(folder), saved_step(folder) or 0
    with open_ledger(file) as read:
        progress = _progress(before, _steps(folder), saved, has_sums(folder))
        again = _cut_files(folder, progress, read.batches, saved)
        counted = read.ledger.audit(steps=max(read.batches) + 1 if again else progress.begun)
    notes = list[str]()
    if again or _cut_ledger(progress, read.batches, counted, saved):
        notes.append(
            f"the run resumes, or was killed as it did: steps from {saved} on are taken again"
        )
        progress = progress.until(saved)
    config = _config(folder, notes)
    kept = _Rollouts()
    if rollouts:
        rows = _rows(folder, config, notes)
        kept = _compare(folder, progress, read.batches, config, rows)
        notes += _uncompared(progress, config, kept.compared)
    return AuditResult(
        run=printable(str(folder)),
        running=running or lock_holder(folder) is not None,
        steps=progress.taken,
        begun=progress.taken < progress.begun and progress.taken in read.batches,
        prompts=counted.prompts,
        used=counted.used,
        dropped=_reasons(counted, "dropped"),
        again=_reasons(counted, "returned"),
        open=counted.open,
        waiting=counted.waiting,
        compared=kept.compared,
        trees=kept.trees,
        oldest=kept.oldest,
        notes=tuple(notes),
        problems=(
            *counted.problems,
            *(f"the ledger has lost its constraint {name}" for name in read.missing),
            *_unmatched(progress, read.batches),
            *(() if config is None else _broken_settings(progress, read.batches, config)),
            *kept.problems,
        ),
    )


def _unlike_records(group: Group, trees: Sequence[Sequence[AgentNode]]) -> list[str]:
    """Where trajectories of agents are not those of their records."""
    said = {
        t.node: int(t.loss_mask.sum()) for t in group.trajectories if t.subgroup.startswith(LEVEL)
    }
    recorded = {node.node: node.tokens for tree in trees for node in tree if node.steps}
    return [
        f"the agent at {place} sampled {recorded.get(place, 0)} tokens by its record, and "
        f"{said.get(place, 0)} by its trajectory"
        for place in sorted({*said, *recorded})
        if said.get(place) != recorded.get(place)
    ]


def _audit_trees(folder: Path, rollouts: bool) -> AuditResult:
    """Audit a synchronous run, which has no ledger: the trees of agents in its saved rollouts."""
    notes, kept = list[str](), _Rollouts()
    config = _config(folder, notes)
    for step in rollout_steps(folder) if rollouts else ():
        kept.compared += 1
        kept.audit_trees(step, read_rollouts(folder, step), config)
    if not kept.trees:
        raise ValueError(
            f"{folder} has no {PROMPTS}, which asynchronous runs have (run.loop; not those of "
            "several policies), and no trees of agents in saved rollouts (run.rollouts)"
        )
    return AuditResult(
        run=printable(str(folder)),
        running=lock_holder(folder) is not None,
        steps=len(_steps(folder)),
        begun=False,
        prompts=0,
        used=0,
        dropped={},
        again={},
        open=0,
        waiting=0,
        compared=kept.compared,
        trees=kept.trees,
        oldest=None,
        notes=("the run is synchronous: it has no ledger of prompts", *notes),
        problems=tuple(kept.problems),
    )


def _reasons(counted: LedgerAudit, end: str) -> dict[str, int]:
    reasons = Counter[str]()
    for count in counted.counts:
        if count.end == end:
            reasons[printable(count.reason[:LONGEST])] += count.leases
    return dict(reasons)


# Steps.


def _steps(folder: Path) -> tuple[Metrics, ...]:
    file = folder / METRICS
    return tuple(read_metrics(file)) if file.exists() else ()


def _progress(
    before: tuple[Metrics, ...], after: tuple[Metrics, ...], saved: int, ended: bool
) -> RunProgress:
    """Steps by metrics.jsonl; by the checkpoint, which comes after them, if lines are missing."""
    taken, later = (max([saved, *(line.step + 1 for line in lines)]) for lines in (before, after))
    return RunProgress(before, taken, max(taken, later) + (not ended))


# A run that resumes goes back to its checkpoint: first its files are cut, then its ledger. Steps
# behind the checkpoint count for nothing then, and are taken again.


def _cut_files(
    folder: Path, progress: RunProgress, batches: Mapping[int, UsedPrompts], saved: int
) -> bool:
    """Whether the ledger still has the steps behind the checkpoint, and no other file."""
    behind = [step for step in batches if step >= saved]
    gapless = behind == list(range(saved, saved + len(behind)))
    files = progress.taken > saved or any(step >= saved for step in rollout_steps(folder))
    ended = progress.begun == progress.taken
    return len(behind) > 1 and gapless and not files and not ended


def _cut_ledger(
    progress: RunProgress, batches: Mapping[int, UsedPrompts], counted: LedgerAudit, saved: int
) -> bool:
    """Whether the ledger has gone back to the checkpoint, and says so, but not the other files."""
    again = any(count.reason == TAKEN_AGAIN.format(saved) for count in counted.counts)
    return again and progress.taken > saved and max(batches, default=-1) < saved


def _unmatched(progress: RunProgress, batches: Mapping[int, UsedPrompts]) -> Iterator[str]:
    """Steps without a batch, batches without a step."""
    steps = {line.step for line in progress.steps}
    if lost := steps - batches.keys():
        yield f"steps in {METRICS} without a batch in the ledger: {_listed(lost)}"
    if unknown := {step for step in batches if step < progress.taken} - steps:
        yield f"batches of steps that {METRICS} does not have: {_listed(unknown)}"
    if (missing := progress.taken - len(steps | unknown)) > 0:
        yield f"steps neither in {METRICS} nor in the ledger: {missing} of {progress.taken}"


def _broken_settings(
    progress: RunProgress, batches: Mapping[int, UsedPrompts], config: TrainConfig
) -> Iterator[str]:
    """Batches of another size, and steps with older tokens, than the settings say."""
    groups, bound = config.rollout.prompts, config.dispatch.staleness
    fresh = fresh_groups(groups, config.dispatch.replay)
    wrong = {
        step
        for step, batch in batches.items()
        if len(batch.fresh) != fresh or len(batch.replayed) > groups - fresh
    }
    if wrong:
        replayed = f" and up to {groups - fresh} replayed" if fresh < groups else ""
        yield f"batches that do not have {fresh} groups{replayed}: of steps {_listed(wrong)}"
    if stale := {line.step for line in progress.steps if (line.values.get(STALENESS) or 0) > bound}:
        yield f"steps with a staleness above {bound} in {METRICS}: {_listed(stale)}"


def _listed(steps: Iterable[int]) -> str:
    first = sorted(steps)
    more = f" and {len(first) - NAMED} more" if first[NAMED:] else ""
    return ", ".join(map(str, first[:NAMED])) + more


# Rollouts.


def _config(folder: Path, notes: list[str]) -> TrainConfig | None:
    try:
        return read_resolved(TrainConfig, folder)
    except ValueError as error:
        unchecked = "sizes of batches, staleness, names of prompts and limits of agents"
        notes.append(f"{unchecked} are not checked: {error}")
        return None


def _rows(folder: Path, config: TrainConfig | None, notes: list[str]) -> Examples | None:
    """The rows of the training, to name its prompts; None where they are not here."""
    if config is None:
        return None
    place = config.data.rows
    try:
        if place is not None and not expanded(place).is_file():  # nothing is downloaded
            raise ValueError(f"{place} is not here")
        rows = open_rows(config.data, seed=config.run.seed)
        if not isinstance(rows, FileRows):
            return rows
        left_out = left_out_rows(folder)
        return rows.keep(lambda example: "left out" if example.id in left_out else None)
    except (ValueError, OSError) as error:
        notes.append(f"prompts of rollouts are counted, not compared by name: {error}")
        return None


def _compare(
    folder: Path,
    progress: RunProgress,
    batches: Mapping[int, UsedPrompts],
    config: TrainConfig | None,
    rows: Examples | None,
) -> _Rollouts:
    """Compare the saved rollouts of every step with its batch."""
    kept = _Rollouts()
    for step in rollout_steps(folder):
        if step >= progress.taken:
            break
        try:
            groups = read_rollouts(folder, step)
        except ValueError as error:
            kept.problems.append(str(error))
            continue
        kept.compared += 1
        kept.audit_trees(step, groups, config)
        kept.problems += _other_prompts(step, groups, batches.get(step, UsedPrompts((), ())), rows)
        ages = [step - version for group in groups for version in _versions(group)]
        kept.oldest = max([*ages, kept.oldest or 0])
        if config is not None and not all(0 <= age <= config.dispatch.staleness for age in ages):
            expected = f"expected 0 to {config.dispatch.staleness} versions"
            kept.problems.append(
                f"tokens in the rollouts of step {step} are {min(ages)} to {max(ages)} versions "
                f"old, {expected}"
            )
    return kept


def _other_prompts(
    step: int, groups: Sequence[Group], batch: UsedPrompts, rows: Examples | None
) -> Iterator[str]:
    """Prompts in the rollouts of a step that its batch does not have, and the other way round."""
    positions = (*batch.fresh, *batch.replayed)
    if len(groups) != len(positions):
        yield f"rollouts of step {step}: {len(groups)} groups, its batch has {len(positions)}"
    elif rows is not None:
        saved = Counter(group.prompt_id for group in groups)
        used = Counter(rows.at(position).id for position in positions)
        if saved != used:
            more, less = (_named(a - b) for a, b in ((saved, used), (used, saved)))
            yield f"rollouts of step {step} have {more} where its batch has {less}"


def _named(prompts: Iterable[str]) -> str:
    return ", ".join(printable(name[:LONGEST]) for name in sorted(prompts)[:NAMED])


def _versions(group: Group) -> Iterator[int]:
    """The oldest and the newest weights that sampled a trajectory, of each."""
    for trajectory in group.trajectories:
        sampled = trajectory.weight_version[trajectory.weight_version >= 0]
        if len(sampled):
            yield from (int(sampled.min()), int(sampled.max()))


def _uncompared(progress: RunProgress, config: TrainConfig | None, compared: int) -> Iterator[str]:
    """How many steps should have rollouts and have none: they may have been removed."""
    every = 0 if config is None else config.run.rollouts
    expected = -(-progress.taken // every) if every else 0
    if compared < expected:
        yield f"rollouts of {compared} of {progress.taken} steps are there to be compared"
