"""A calibration from beginning to end: rounds of measuring until the plan no longer depends on it.

First every flow under every budget, then the dense floor, then groups of layers alone, and last
what those suggest: budgets by layer, and the group that loses most left dense. Started again with
the same settings, a calibration goes on where it was stopped; decisions look at whole rounds alone,
so on a CPU, where draws do not depend on batches, it comes to the same surface.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sparrow.calibrate import deciding
from sparrow.calibrate.arms import DENSE, Arm, arm, layers_alone, variant_of
from sparrow.calibrate.cells import By, cells, tail_of
from sparrow.calibrate.collecting import Collector
from sparrow.calibrate.replay import TOP_K, Prompt
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, LayerLoss, Variant
from sparrow.schema.types import Report
from sparrow.sparse.flows.flow import Flow

BY_LAYER = "by layer"
LAYER_PROMPTS = 16  # sequences on which groups of layers are measured alone
VERY_FEW = 4  # prompts that reach a bin below which no decision waits for it


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
        self.budgets, self.edges, self.targets = budgets, edges, targets
        self.spec = collector.model.spec
        self.found = Found()
        self._report = report or (lambda text: None)

    def run(self, flows: Sequence[tuple[Flow, Variant]]) -> Found:
        """Every flow under every budget, as far as the plan depends on it; the floor; layers."""
        if not flows or not self.budgets:
            raise ValueError("no flow or no budget to calibrate")
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
        variant = variant_of(
            flow,
            flow.name,
            self.spec,
            name=schedule.name,
            page=schedule.page,
            first=schedule.first,
            last=schedule.last,
            dense_layers=schedule.dense_layers,
        )
        own = arm(variant, flow, None, name=schedule.name, schedule=schedule)
        every = len(self.collector.prompts)
        self.collector.collect({own: every, DENSE: self._enough})
        self.found.variants.append(variant)
        self._add(own, every)
        self._floor()
        return self.found

    # Rounds.

    @property
    def _enough(self) -> int:
        """Prompts of which the floor is known well enough."""
        return min(LEAST_PROMPTS, len(self.collector.prompts))

    def _variant(
        self, flow: Flow, variant: Variant, beside: Mapping[Arm, int] | None = None
    ) -> None:
        """Rounds until the plan for this variant stands; `beside` runs along in the first."""
        arms = {budget: arm(variant, flow, budget) for budget in self.budgets}
        most = len(self.collector.prompts)
        wanted = {one: min(self.config.first_round, most) for one in arms.values()}
        while True:
            self.collector.collect({**wanted, **(beside or {})})
            rows = {budget: self._row(one, wanted[one]) for budget, one in arms.items()}
            questions = deciding.open_questions(rows, self.targets)
            more = {arms[each.budget] for each in questions if wanted[arms[each.budget]] < most}
            if not more:
                break
            wanted |= {one: min(wanted[one] + self.config.first_round, most) for one in more}
            self._report(
                f"{variant.name}: the plan depends on {len(more)} of {len(arms)} budgets still "
                f"({', '.join(str(one.budget) for one in arms.values() if one in more)} tokens)"
            )
        self.found.variants.append(variant)
        for one in arms.values():
            self._add(one, wanted[one])
        self.found.undecided += [self._told(variant, each) for each in questions]

    def _row(self, one: Arm, count: int) -> list[deciding.Seen | None]:
        """What is known by bin; of very few prompts nothing is."""
        tokens = self.collector.tokens(one, self.collector.prompts[:count])
        row: list[deciding.Seen | None] = []
        for start, stop in pairwise(self.edges):
            own = tokens.within(start, stop)
            prompts = len(own.by_prompt())
            if prompts < min(VERY_FEW, count):
                row.append(None)
                continue
            tail = tail_of(own)
            row.append(deciding.Seen(tail.value, tail.low, tail.high, prompts))
        return row

    def _told(self, variant: Variant, each: deciding.Open) -> str:
        start, stop = self.edges[each.bin : each.bin + 2]
        return (
            f"{variant.name}, {each.budget} tokens, lengths {start} to {stop}: "
            f"{each.why} at target {each.target}"
        )

    def _floor(self) -> None:
        """Dense against dense: what rounding alone costs, and how long answers are."""
        prompts = self.collector.prompts[: self._enough]
        self.found.floor += self._cells(DENSE, self._enough)
        for one in self.collector.measured(DENSE, prompts):
            self.found.lengths.append(len(one.ids))
            self.found.prompt_tokens.append(one.prompt_tokens)

    # Layers.

    def _layers(self, flow: Flow, variant: Variant) -> None:
        """Every group of layers alone, under a budget whose tail misses the target."""
        layers, budget = self.spec.layers, self._biting(variant)
        sequences = self._longer(budget)
        if not sequences:
            self.found.warnings.append(
                f"no sequence is longer than the budget of {budget} tokens: layers were not told "
                "apart; give smaller budgets or longer sequences"
            )
            return
        groups = deciding.groups_of(layers, self.config.layer_groups, variant.dense_layers)
        arms = {group: layers_alone(variant, flow, budget, group, layers) for group in groups}
        self.collector.force(list(arms.values()), sequences)
        self.found.layers += [
            deciding.loss(self.collector.tokens(one, sequences), one, group)
            for group, one in arms.items()
        ]

    def _biting(self, variant: Variant) -> int:
        """The largest budget whose tail still misses the first target somewhere, or the least."""
        target = self.targets[0]
        misses = [
            cell.budget
            for cell in self.found.cells
            if cell.variant == variant.name and cell.budget is not None and cell.p05 < target
        ]
        long = [budget for budget in misses if self._longer(budget)]
        return max(long, default=min(self.budgets))

    def _longer(self, budget: int) -> list[Prompt]:
        """The first sequences in which a budget bites."""
        longer = [one for one in self.collector.sequences() if len(one.ids) > budget + 2]
        return longer[:LAYER_PROMPTS]

    def _suggested(self, variant: Variant) -> list[Variant]:
        """Budgets shared out by what groups lose; and the group that loses most left dense."""
        own = [cell for cell in self.found.cells if cell.variant == variant.name]
        losses = self.found.layers
        worst = min(losses, key=lambda each: each.p05).layers
        dense = tuple(sorted({*variant.dense_layers, *worst}))
        shared = deciding.shares(losses, own, self.spec.layers)
        found = [variant.replace(name=f"{variant.name}, {BY_LAYER}", shares=shared)]
        if len(dense) < self.spec.layers:
            name = f"{variant.name}, dense {','.join(map(str, dense))}"
            found.append(variant.replace(name=name, dense_layers=dense))
        known = {made.name for made in self.found.variants}
        return [made for made in found if made.name not in known]

    # Results.

    def _add(self, one: Arm, count: int) -> None:
        self.found.cells += self._cells(one, count)
        self.found.positions += self._cells(one, count, "position")

    def _cells(self, one: Arm, count: int, by: By = "length") -> list[Cell]:
        return cells(
            self.collector.tokens(one, self.collector.prompts[:count]),
            self.edges,
            variant=one.variant,
            budget=one.budget,
            top_k=min(TOP_K, self.spec.vocabulary),
            by=by,
        )
