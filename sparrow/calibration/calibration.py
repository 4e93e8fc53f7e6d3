"""Calibration: measures acceptance in rounds until the plan no longer depends on more samples.

First every flow under every budget, then the dense floor, then groups of layers alone, and last
what those suggest: budgets by layer, and the group that loses most left dense. Started again with
the same settings, a calibration resumes where it was stopped; decisions use whole rounds alone, so
on a CPU, where draws do not depend on batches, it gives the same surface.
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
from sparrow.calibration.drafts import DRAFTS, measure_drafts
from sparrow.calibration.replay import (
    DENSE,
    MOST_ARMS,
    TOP_K,
    Arm,
    Prompt,
    RolloutJob,
    make_arm,
    make_variant,
    roll_out,
    teacher_force,
)
from sparrow.calibration.store import MeasuredSequence, Store, Trajectories
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.models.lora import Adapter
from sparrow.schema.calibrate import CalibrateConfig, PromptsConfig
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, DraftCell, LayerLoss, Variant
from sparrow.schema.types import Progress, Report
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule

BY_LAYER = "by layer"
LAYER_PROMPTS = 16  # sequences on which groups of layers are measured alone
VERY_FEW = 4  # prompts that reach a bin below which no decision waits for it
SPREAD = 1_000_003  # between the seeds of neighbouring calibrations: prompts are far fewer

Mode = Literal["generated", "forced"]


@dataclass(frozen=True, slots=True)
class Collector:
    """Measures arms of one model on numbered prompts, and keeps the results in a store.

    By rollouts, or teacher-forced on given sequences. What is in the store is not measured again,
    also after an interruption. Seeds are the same for every arm.
    """

    model: Decoder
    prompts: Sequence[Prompt]
    mode: Mode
    config: PromptsConfig
    store: Trajectories
    progress: Progress | None = None
    actor: Adapter | None = None  # the adapter of the sparse actor

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("expected at least one prompt")
        for prompt in self.prompts if self.mode == "generated" else ():
            self._params(prompt)  # prompts that do not fit are refused before measuring

    def _progress(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)

    def collect(self, prompts_by_arm: Mapping[Arm, int]) -> None:
        """Measure each arm on its first prompts; arms of one rule, and dense."""
        arms_by_prompt = {
            prompt: [arm for arm, count in prompts_by_arm.items() if number < count]
            for number, prompt in enumerate(self.prompts)
        }
        if self.mode == "forced":
            self.teacher_force(arms_by_prompt)
            return
        jobs = [  # prompt by prompt, so that arms advance together
            RolloutJob(arm, prompt, self._params(prompt))
            for prompt, missing in self._missing(arms_by_prompt, self.config.samples).items()
            for arm in missing
        ]
        arms = [arm for arm in prompts_by_arm if self.actor is None or arm != DENSE]
        groups = [arms[first : first + MOST_ARMS] for first in range(0, len(arms), MOST_ARMS)]
        if len(arms) < len(prompts_by_arm):  # beside dense rows an adapter is not merged, so slow
            groups.append([DENSE])
        for together in groups:
            self._roll_out([job for job in jobs if job.arm in together])

    def _missing(
        self, arms_by_prompt: Mapping[Prompt, Sequence[Arm]], samples: int
    ) -> dict[Prompt, list[Arm]]:
        """Return the arms of each prompt that have a sample missing in the store."""
        requested = {arm for arms in arms_by_prompt.values() for arm in arms}
        done, missing = {arm: self.store.done(arm.key) for arm in requested}, {}
        for prompt, arms in arms_by_prompt.items():
            samples_needed = {(prompt.number, sample) for sample in range(samples)}
            missing[prompt] = [arm for arm in arms if not samples_needed <= done[arm]]
        return missing

    def _roll_out(self, jobs: Sequence[RolloutJob]) -> None:
        if not jobs:
            return
        arms = {job.arm for job in jobs}
        sparse = next((arm for arm in arms if arm.schedule is not None), DENSE)
        rule = None if sparse.schedule is None else Rule.of(sparse.schedule, sparse.flow)
        longest = max(len(prompt.ids) for prompt in self.prompts) + self.config.answer_tokens
        context = min(longest, self.model.spec.max_positions)
        engine = Engine(self.model, rule=rule, max_context=context, reuse="none")
        engine.set_actor(self.actor)
        total = len(jobs) * self.config.samples
        what = f"{sparse.variant}: {len(arms)} arms"
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

    def teacher_force(self, arms_by_prompt: Mapping[Prompt, Sequence[Arm]]) -> None:
        """Measure arms on given sequences, teacher-forced."""
        missing = {p: arms for p, arms in self._missing(arms_by_prompt, 1).items() if arms}
        total, count = sum(map(len, missing.values())), 0
        for prompt, arms in missing.items():
            self._progress(count, total, f"reading: {prompt.name}, dense")
            for arm, measured in self._forced(prompt, arms):
                count += 1
                self.store.put(arm.key, measured)
                self._progress(count, total, f"reading: {prompt.name}, {arm.name}")

    def _forced(
        self, prompt: Prompt, arms: Sequence[Arm]
    ) -> Iterator[tuple[Arm, MeasuredSequence]]:
        return teacher_force(self.model, prompt, arms, self.config.temperature, self.actor)

    def sequences(self) -> list[Prompt]:
        """Whole sequences: those given, or the first answer to each prompt of the dense policy."""
        if self.mode == "forced":
            return list(self.prompts)
        return [
            Prompt(
                number=answer.prompt,
                name=f"answer {answer.prompt}",
                ids=tuple(answer.ids.tolist()),
                start=answer.prompt_tokens,
            )
            for answer in self.measured(DENSE, self.prompts)
            if answer.sample == 0
        ]

    def measured(self, arm: Arm, prompts: Sequence[Prompt]) -> Iterator[MeasuredSequence]:
        """Read the measured sequences of an arm on these prompts, not of a round cut short."""
        numbers = {prompt.number for prompt in prompts}
        return (sequence for sequence in self.store.of(arm.key) if sequence.prompt in numbers)

    def tokens(self, arm: Arm, prompts: Sequence[Prompt]) -> Tokens:
        return Tokens.of(self.measured(arm, prompts))


@dataclass(slots=True, kw_only=True)
class Findings:
    """Results of a calibration, from which a surface is made."""

    variants: list[Variant] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    positions: list[Cell] = field(default_factory=list)
    floor: list[Cell] = field(default_factory=list)
    layers: list[LayerLoss] = field(default_factory=list)
    drafts: list[DraftCell] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)


class Calibration:
    """Decides what the collector measures next, and aggregates it into cells.

    edges: of the bins of total length. The rest is in the collector's configuration.
    """

    def __init__(
        self,
        collector: Collector,
        config: CalibrateConfig,
        *,
        budgets: Sequence[int],
        edges: Sequence[int],
        targets: Sequence[float],
        report: Report | None = None,
    ) -> None:
        self.collector, self.config = collector, config
        self.prompts = collector.prompts
        self.budgets, self.edges, self.targets = budgets, edges, targets
        self.spec = collector.model.spec
        self.findings = Findings()
        self._report = report or (lambda text: None)

    def run(self, flows: Sequence[tuple[Flow, Variant]]) -> Findings:
        """Measure flows under budgets, as far as the plan needs it, the floor, and layers."""
        for number, (flow, variant) in enumerate(flows):
            self._variant(flow, variant, beside={} if number else {DENSE: self._enough})
        self._floor()
        flow, variant = flows[0]
        if self.config.layer_groups:
            self._layers(flow, variant)
        if self.config.by_layer and self.findings.layers:
            for suggested in self._suggested(variant):
                self._variant(flow, suggested)
        self._drafts([make_arm(v, f, budget) for f, v in flows for budget in self.budgets])
        return self.findings

    def check(self, flow: Flow, schedule: Schedule) -> Findings:
        """Measure a whole schedule on every prompt, and the dense floor."""
        names = ("name", "page", "first", "last", "dense_layers")
        about = {name: getattr(schedule, name) for name in names}
        variant = make_variant(flow, flow.name, self.spec, **about)
        checked = make_arm(variant, flow, None, schedule=schedule)
        self.collector.collect({checked: len(self.prompts), DENSE: self._enough})
        self.findings.variants.append(variant)
        tokens = self.collector.tokens(checked, self.prompts)
        self._add(checked, tokens, self._cells(checked, tokens))
        self._floor()
        self._drafts([checked])
        return self.findings

    # Rounds.

    @property
    def _enough(self) -> int:
        """How many prompts the dense floor is measured on."""
        return min(LEAST_PROMPTS, len(self.prompts))

    def _variant(
        self, flow: Flow, variant: Variant, beside: Mapping[Arm, int] | None = None
    ) -> None:
        """Measure a variant in rounds until its plan is decided; `beside` joins the first round."""
        most = len(self.prompts)
        arms = [make_arm(variant, flow, budget) for budget in self.budgets]
        counts = dict.fromkeys(arms, min(self.config.first_round, most))
        tokens: dict[Arm, Tokens] = {}
        cells_by_arm: dict[Arm, list[Cell]] = {}
        more = arms
        while True:
            self.collector.collect({**counts, **(beside or {})})
            for arm in more:
                tokens[arm] = self.collector.tokens(arm, self.prompts[: counts[arm]])
                cells_by_arm[arm] = self._cells(arm, tokens[arm])
            reliable = [
                cell
                for arm in arms
                for cell in cells_by_arm[arm]
                if cell.prompts >= min(VERY_FEW, counts[arm])
            ]
            questions = open_questions(reliable, self.targets)
            budgets = {question.cell.budget for question in questions}
            more = [arm for arm in arms if arm.budget in budgets and counts[arm] < most]
            if not more:
                break
            counts |= {arm: min(counts[arm] + self.config.first_round, most) for arm in more}
            self._report(
                f"{variant.name}: the plan depends on {len(more)} of {len(arms)} budgets still "
                f"({', '.join(str(arm.budget) for arm in more)} tokens)"
            )
        self.findings.variants.append(variant)
        for arm in arms:
            self._add(arm, tokens[arm], cells_by_arm[arm])
        self.findings.undecided += map(str, questions)

    def _floor(self) -> None:
        """Add the dense floor (what rounding alone costs) and the lengths of answers."""
        measured = list(self.collector.measured(DENSE, self.prompts[: self._enough]))
        self.findings.floor += self._cells(DENSE, Tokens.of(measured))
        self.findings.lengths += [len(sequence.ids) for sequence in measured]
        self.findings.prompt_tokens += [sequence.prompt_tokens for sequence in measured]

    def _drafts(self, arms: Sequence[Arm]) -> None:
        """Measure the drafts of exact decoding on whole sequences, if they are asked for."""
        if draft_tokens := self.config.draft_tokens:
            measured = measure_drafts(
                self.collector.model,
                self.collector.sequences(),
                arms,
                Store(self.collector.store.file.with_name(DRAFTS)),
                draft_tokens=draft_tokens,
                reselect=self.config.reselect,
                temperature=self.config.temperature,
                progress=self.collector.progress,
                actor=self.collector.actor,
            )
            self.findings.drafts += measured
            expected = len(arms) * len(self.config.reselect)
            if missing := expected - len(measured):
                self.findings.warnings.append(
                    f"drafts: {missing} of {expected} cells have no round of {draft_tokens}: no "
                    "sequence is so much longer than the budget"
                )

    # Layers.

    def _layers(self, flow: Flow, variant: Variant) -> None:
        """Measure every group of layers sparse alone, on sequences longer than a budget.

        The budget is the largest whose tail misses the first target somewhere, or the least.
        """
        whole = self.collector.sequences()
        longest = max((len(sequence.ids) for sequence in whole), default=0)
        misses = [
            cell.budget
            for cell in self.findings.cells
            if cell.variant == variant.name and cell.budget and cell.p05 < self.targets[0]
        ]
        biting = [budget for budget in misses if longest > budget + 2]
        budget = max(biting, default=min(self.budgets))
        sequences = [prompt for prompt in whole if len(prompt.ids) > budget + 2][:LAYER_PROMPTS]
        if not sequences:
            self.findings.warnings.append(
                f"no sequence is longer than the budget of {budget} tokens: layers were not "
                "measured alone; use smaller budgets or longer sequences"
            )
            return
        every = range(self.spec.layers)
        arms = {}
        for group in layer_groups(len(every), self.config.layer_groups, variant.dense_layers):
            dense = tuple(layer for layer in every if layer not in group)
            name = f"layers {group[0]} to {group[-1]} alone"
            alone = variant.replace(name=name, dense_layers=dense, shares=())
            arms[group] = make_arm(alone, flow, budget, given=True)
        self.collector.teacher_force({sequence: [*arms.values()] for sequence in sequences})
        self.findings.layers += [
            layer_loss(self.collector.tokens(sequence, sequences), variant.name, budget, group)
            for group, sequence in arms.items()
        ]

    def _suggested(self, variant: Variant) -> list[Variant]:
        """Budgets in proportion to what layers lose; and the group that loses most left dense."""
        cells = [cell for cell in self.findings.cells if cell.variant == variant.name]
        losses = self.findings.layers
        worst = min(losses, key=lambda loss: loss.p05).layers
        dense = tuple(sorted({*variant.dense_layers, *worst}))
        shared = shares(losses, cells, self.spec.layers)
        by_layer = variant.replace(name=f"{variant.name}, {BY_LAYER}", shares=shared)
        suggested = [by_layer] if self._budgets(by_layer) != self._budgets(variant) else []
        if len(dense) < self.spec.layers:
            name = f"{variant.name}, dense {','.join(map(str, dense))}"
            suggested.append(variant.replace(name=name, dense_layers=dense))
        measured = {other.name for other in self.findings.variants}
        return [other for other in suggested if other.name not in measured]

    def _budgets(self, variant: Variant) -> list[int]:
        """What each layer keeps under each budget: shares may round to the same pages."""
        schedules = [variant.schedule([0], [budget]) for budget in self.budgets]
        layers = range(self.spec.layers)
        return [schedule.budget(0, layer) for schedule in schedules for layer in layers]

    # Results.

    def _add(self, arm: Arm, tokens: Tokens, measured: Sequence[Cell]) -> None:
        self.findings.cells += measured
        self.findings.positions += self._cells(arm, tokens, "position")

    def _cells(self, arm: Arm, tokens: Tokens, by: By = "length") -> list[Cell]:
        top_k = min(TOP_K, self.spec.vocabulary)
        return cells(tokens, self.edges, arm.variant, arm.budget, top_k=top_k, by=by)
