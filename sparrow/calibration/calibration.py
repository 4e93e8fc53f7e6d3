"""A calibration from beginning to end: rounds of measuring until the plan no longer depends on it.

First every flow under every budget, then the dense floor, then groups of layers alone, and last
what those suggest: budgets by layer, and the group that loses most left dense. Started again with
the same settings, a calibration goes on where it was stopped; decisions look at whole rounds alone,
so on a CPU, where draws do not depend on batches, it comes to the same surface.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sparrow.calibration.cells import (
    By,
    Tokens,
    cells,
    layer_groups,
    layer_loss,
    open_questions,
    shares,
)
from sparrow.calibration.replay import (
    DENSE,
    MOST_ARMS,
    TOP_K,
    Arm,
    Prompt,
    RolloutJob,
    arm,
    roll_out,
    teacher_force,
    variant_of,
)
from sparrow.calibration.store import MeasuredSequence, Trajectories
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.schema.calibrate import CalibrateConfig
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, LayerLoss, Variant
from sparrow.schema.types import Progress, Report
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule

BY_LAYER = "by layer"
LAYER_PROMPTS = 16  # sequences on which groups of layers are measured alone
VERY_FEW = 4  # prompts that reach a bin below which no decision waits for it
SPREAD = 1_000_003  # between the seeds of neighbouring calibrations: prompts are far fewer

Mode = Literal["generated", "forced"]


class Collector:
    """Sees to it that arms of one model have been measured on numbered prompts, into a store.

    By rollouts, or by force on what is given. What the store has is not made again, so whoever asks
    twice pays once, also after an interruption. Draws are the same for every arm.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Prompt],
        mode: Mode,
        config: CalibrateConfig,
        store: Trajectories,
        progress: Progress | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("no prompt to calibrate on")
        self.model, self.prompts, self.mode = model, prompts, mode
        self.config, self.store = config, store
        if mode == "generated":
            for prompt in prompts:  # whatever does not fit is said before anything is measured
                self._params(prompt)
        self._progress = progress or (lambda done, total, what: None)

    def collect(self, wanted: Mapping[Arm, int]) -> None:
        """So many prompts of every arm, the first ones; arms of one rule, and dense."""
        places = {
            prompt: [one for one, count in wanted.items() if number < count]
            for number, prompt in enumerate(self.prompts)
        }
        if self.mode == "forced":
            self.teacher_force(places)
            return
        jobs = [  # prompt by prompt, so that arms advance together
            RolloutJob(one, prompt, self._params(prompt))
            for prompt, lacking in self._missing(places, self.config.samples).items()
            for one in lacking
        ]
        arms = list(wanted)
        for first in range(0, len(arms), MOST_ARMS):
            together = arms[first : first + MOST_ARMS]
            self._roll_out([job for job in jobs if job.arm in together])

    def _missing(
        self, places: Mapping[Prompt, Sequence[Arm]], samples: int
    ) -> dict[Prompt, list[Arm]]:
        """Arms of which a sample is not in the store yet."""
        asked = {one for arms in places.values() for one in arms}
        done, every = {one: self.store.done(one.key) for one in asked}, range(samples)
        return {
            prompt: [one for one in arms if any((prompt.number, n) not in done[one] for n in every)]
            for prompt, arms in places.items()
        }

    def _roll_out(self, jobs: Sequence[RolloutJob]) -> None:
        if not jobs:
            return
        arms = {job.arm for job in jobs}
        one = next((each for each in arms if each.schedule is not None), DENSE)
        rule = None if one.schedule is None else Rule.of(one.schedule, one.flow)
        longest = max(len(prompt.ids) for prompt in self.prompts) + self.config.answer_tokens
        context = min(longest, self.model.spec.max_positions)
        engine = Engine(self.model, rule=rule, max_context=context, reuse="none")
        total = len(jobs) * self.config.samples
        what = f"{one.variant}: {len(arms)} arms"
        self._progress(0, total, what)
        for done, (job, measured) in enumerate(roll_out(engine, jobs), 1):
            self.store.put(job.arm.key, measured)
            self._progress(done, total, what)

    def _params(self, prompt: Prompt) -> SamplingParams:
        context = self.model.spec.max_positions
        left = context - len(prompt.ids)
        if left < 2:
            raise ValueError(
                f"prompt {prompt.name} has {len(prompt.ids)} tokens, the model's context "
                f"{context}: nothing can follow it"
            )
        return SamplingParams(
            n=self.config.samples,
            temperature=self.config.temperature,
            max_tokens=min(self.config.answer_tokens, left),
            seed=self.config.seed * SPREAD + prompt.number,
        )

    def teacher_force(self, places: Mapping[Prompt, Sequence[Arm]]) -> None:
        """Arms on sequences that are given."""
        missing = self._missing(places, 1)
        total, count = sum(len(arms) for arms in missing.values()), 0
        for prompt, arms in missing.items():
            if not arms:
                continue
            self._progress(count, total, f"reading: {prompt.name}, dense")
            for one, measured in teacher_force(self.model, prompt, arms, self.config.temperature):
                count += 1
                self.store.put(one.key, measured)
                self._progress(count, total, f"reading: {prompt.name}, {one.name}")

    def sequences(self) -> list[Prompt]:
        """Whole sequences: those given, or the first answer to each prompt of the dense policy."""
        if self.mode == "forced":
            return list(self.prompts)
        return [
            Prompt(
                number=one.prompt,
                name=f"answer {one.prompt}",
                ids=tuple(one.ids.tolist()),
                start=one.prompt_tokens,
            )
            for one in self.measured(DENSE, self.prompts)
            if one.sample == 0
        ]

    def measured(self, one: Arm, prompts: Sequence[Prompt]) -> Iterator[MeasuredSequence]:
        """What was measured of an arm on these prompts: a round cut short does not count."""
        wanted = {prompt.number for prompt in prompts}
        return (each for each in self.store.of(one.key) if each.prompt in wanted)

    def tokens(self, one: Arm, prompts: Sequence[Prompt]) -> Tokens:
        return Tokens.of(self.measured(one, prompts))


@dataclass(slots=True, kw_only=True)
class Found:
    """What a calibration has come to; a surface is made from it."""

    variants: list[Variant] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    positions: list[Cell] = field(default_factory=list)
    floor: list[Cell] = field(default_factory=list)
    layers: list[LayerLoss] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)


class Calibration:
    """Decides what a collector measures, and adds it up.

    edges: of the bins of total length. The rest is in the collector's configuration.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        budgets: Sequence[int],
        edges: Sequence[int],
        targets: Sequence[float],
        report: Report | None = None,
    ) -> None:
        self.collector, self.config = collector, collector.config
        self.prompts = collector.prompts
        self.budgets, self.edges, self.targets = budgets, edges, targets
        self.spec = collector.model.spec
        self.found = Found()
        self._report = report or (lambda text: None)

    def run(self, flows: Sequence[tuple[Flow, Variant]]) -> Found:
        """Every flow under every budget, as far as the plan depends on it; the floor; layers."""
        for number, (flow, variant) in enumerate(flows):
            self._variant(flow, variant, beside={} if number else {DENSE: self._enough})
        self._floor()
        flow, variant = flows[0]
        if self.config.layer_groups:
            self._layers(flow, variant)
        if self.config.by_layer and self.found.layers:
            for suggested in self._suggested(variant):
                self._variant(flow, suggested)
        return self.found

    def check(self, flow: Flow, schedule: Schedule) -> Found:
        """A whole schedule on every prompt, and the floor beside it."""
        names = ("name", "page", "first", "last", "dense_layers")
        about = {name: getattr(schedule, name) for name in names}
        variant = variant_of(flow, flow.name, self.spec, **about)
        own = arm(variant, flow, None, schedule=schedule)
        self.collector.collect({own: len(self.prompts), DENSE: self._enough})
        self.found.variants.append(variant)
        tokens = self.collector.tokens(own, self.prompts)
        self._add(own, tokens, self._cells(own, tokens))
        self._floor()
        return self.found

    # Rounds.

    @property
    def _enough(self) -> int:
        """Prompts of which the floor is known well enough."""
        return min(LEAST_PROMPTS, len(self.prompts))

    def _variant(
        self, flow: Flow, variant: Variant, beside: Mapping[Arm, int] | None = None
    ) -> None:
        """Rounds until the plan for this variant stands; `beside` runs along in the first."""
        most = len(self.prompts)
        arms = [arm(variant, flow, budget) for budget in self.budgets]
        wanted = dict.fromkeys(arms, min(self.config.first_round, most))
        tokens: dict[Arm, Tokens] = {}
        found: dict[Arm, list[Cell]] = {}
        more = arms
        while True:
            self.collector.collect({**wanted, **(beside or {})})
            for one in more:
                tokens[one] = self.collector.tokens(one, self.prompts[: wanted[one]])
                found[one] = self._cells(one, tokens[one])
            known = [
                cell
                for one in arms
                for cell in found[one]
                if cell.prompts >= min(VERY_FEW, wanted[one])
            ]
            questions = open_questions(known, self.targets)
            asked = {each.cell.budget for each in questions}
            more = [one for one in arms if one.budget in asked and wanted[one] < most]
            if not more:
                break
            wanted |= {one: min(wanted[one] + self.config.first_round, most) for one in more}
            self._report(
                f"{variant.name}: the plan depends on {len(more)} of {len(arms)} budgets still "
                f"({', '.join(str(one.budget) for one in more)} tokens)"
            )
        self.found.variants.append(variant)
        for one in arms:
            self._add(one, tokens[one], found[one])
        self.found.undecided += map(str, questions)

    def _floor(self) -> None:
        """Dense against dense: what rounding alone costs, and how long answers are."""
        measured = list(self.collector.measured(DENSE, self.prompts[: self._enough]))
        self.found.floor += self._cells(DENSE, Tokens.of(measured))
        self.found.lengths += [len(one.ids) for one in measured]
        self.found.prompt_tokens += [one.prompt_tokens for one in measured]

    # Layers.

    def _layers(self, flow: Flow, variant: Variant) -> None:
        """Every group of layers alone, on the first sequences in which a budget bites.

        The budget is the largest whose tail misses the first target somewhere, or the least.
        """
        whole = self.collector.sequences()
        longest = max((len(one.ids) for one in whole), default=0)
        misses = [
            cell.budget
            for cell in self.found.cells
            if cell.variant == variant.name and cell.budget and cell.p05 < self.targets[0]
        ]
        biting = [budget for budget in misses if longest > budget + 2]
        budget = max(biting, default=min(self.budgets))
        sequences = [one for one in whole if len(one.ids) > budget + 2][:LAYER_PROMPTS]
        if not sequences:
            self.found.warnings.append(
                f"no sequence is longer than the budget of {budget} tokens: layers were not told "
                "apart; give smaller budgets or longer sequences"
            )
            return
        every = range(self.spec.layers)
        arms = {}
        for group in layer_groups(len(every), self.config.layer_groups, variant.dense_layers):
            dense = tuple(layer for layer in every if layer not in group)
            name = f"layers {group[0]} to {group[-1]} alone"
            alone = variant.replace(name=name, dense_layers=dense, shares=())
            arms[group] = arm(alone, flow, budget, given=True)
        self.collector.teacher_force({one: [*arms.values()] for one in sequences})
        self.found.layers += [
            layer_loss(self.collector.tokens(one, sequences), variant.name, budget, group)
            for group, one in arms.items()
        ]

    def _suggested(self, variant: Variant) -> list[Variant]:
        """Budgets in proportion to what layers lose; and the group that loses most left dense."""
        cells = [cell for cell in self.found.cells if cell.variant == variant.name]
        losses = self.found.layers
        worst = min(losses, key=lambda loss: loss.p05).layers
        dense = tuple(sorted({*variant.dense_layers, *worst}))
        shared = shares(losses, cells, self.spec.layers)
        by_layer = variant.replace(name=f"{variant.name}, {BY_LAYER}", shares=shared)
        suggested = [by_layer] if self._budgets(by_layer) != self._budgets(variant) else []
        if len(dense) < self.spec.layers:
            name = f"{variant.name}, dense {','.join(map(str, dense))}"
            suggested.append(variant.replace(name=name, dense_layers=dense))
        measured = {other.name for other in self.found.variants}
        return [other for other in suggested if other.name not in measured]

    def _budgets(self, variant: Variant) -> list[int]:
        """What each layer keeps under each budget: shares may round to the same pages."""
        schedules = [variant.schedule([0], [budget]) for budget in self.budgets]
        layers = range(self.spec.layers)
        return [schedule.budget(0, layer) for schedule in schedules for layer in layers]

    # Results.

    def _add(self, one: Arm, tokens: Tokens, known: Sequence[Cell]) -> None:
        self.found.cells += known
        self.found.positions += self._cells(one, tokens, "position")

    def _cells(self, one: Arm, tokens: Tokens, by: By = "length") -> list[Cell]:
        top_k = min(TOP_K, self.spec.vocabulary)
        return cells(tokens, self.edges, one.variant, one.budget, top_k=top_k, by=by)
