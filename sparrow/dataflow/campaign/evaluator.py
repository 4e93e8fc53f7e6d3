"""Checks and scores the candidates of a campaign, in a process that may be killed when it is late.

`make_evaluator` is the target of a worker (sparrow/processes): a model and the texts of every split
are loaded once; a question names a file and a split. What was measured is kept, by the content of
flow, text and model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparrow.calibration.flows.check import check, kernels
from sparrow.calibration.flows.score import (
    CELLS,
    DenseText,
    TokenizedText,
    interval,
    samples,
    score,
)
from sparrow.calibration.flows.texts import SPLITS, Split
from sparrow.calibration.replay import make_variant
from sparrow.calibration.store import Store
from sparrow.dataflow.campaign.splits import apart, texts_of
from sparrow.models import Decoder, fingerprint, load, load_tokenizer
from sparrow.schema.campaign import BASELINES, OBJECTIVES, FlowLoopConfig, Objective, SplitScore
from sparrow.schema.evaluation import Estimate
from sparrow.schema.flow import Configuration, FlowScore, FlowScores
from sparrow.sparse.flows.flow import trace
from sparrow.sparse.flows.loading import load_flow

Json = dict[str, Any]
PAGE = 16
LEAST = 5  # texts of an interval


def make_evaluator(config: Json) -> Callable[[Json], Json]:
    evaluator = Evaluator(FlowLoopConfig.model_validate_json(config["settings"]))
    return evaluator.answer


class Evaluator:
    """The model and the texts of a campaign."""

    def __init__(self, config: FlowLoopConfig) -> None:
        self.config, self.notes = config, list[str]()
        tokenizer, found = load_tokenizer(config.model), dict[Split, list[TokenizedText]]()
        for split in SPLITS:
            texts = texts_of(config, split, self.notes.append)
            found[split] = samples(tokenizer, texts, config.tokens)
        self.texts = apart(found)
        self.model: Decoder = load(config.model, dtype=config.dtype, device=config.device)
        self.store = Store(config.out / CELLS)
        self.dense = dict[str, DenseText]()

    def answer(self, question: Json) -> Json:
        """{"about"}, {"flow", "split"} or {"flow", "known"}: JSON, or {"invalid": reason}."""
        if "flow" not in question:
            return self._about()
        try:
            flow = load_flow(question["flow"])
        except ValueError as error:
            return {"invalid": str(error)}
        spec = self.model.spec
        group = spec.heads // spec.kv_heads
        try:
            program = trace(flow, PAGE, spec.head_size, group)
        except ValueError as error:
            return {"invalid": str(error)}
        if program.score is None:
            return {"invalid": "score=None keeps every page, whatever the budget"}
        if question.get("program", program.digest) != program.digest:
            return {"invalid": "its file is no longer what was scored"}
        found: Json = {"program": program.digest, "bytes": program.bytes() // program.layers}
        found |= {"of_mean": program.read_of_mean}
        found |= {"operations": sum(1 for node in program.nodes if node.inputs)}
        found |= {"kernels": not {"refused", "none"} & kernels(program).keys()}
        if program.digest in question.get("known", ()):
            return found
        tested = check(flow, page=PAGE, head_size=spec.head_size, group=group)
        for test in tested.tests:
            if not test.passed:
                why = test.first or f"{test.near_ties} of {test.choices} choices are ties"
                return found | {"failed": f"{test.sequence}, {test.compared}: {why}"}
        if tested.unordered:
            return found | {"failed": f"{tested.unordered} scores are NaN"}
        return found | {"scores": self._scores(flow, question["split"])}

    def _about(self) -> Json:
        spec = self.model.spec
        return {
            "model": self.config.model,
            "fingerprint": fingerprint(self.model),
            "sizes": {
                "page": PAGE,
                "head_size": spec.head_size,
                "group": spec.heads // spec.kv_heads,
                "kv_heads": spec.kv_heads,
                "layers": spec.layers,
                "rope_theta": spec.rope.theta,
            },
            "texts": {split: [t.sha256 for t in texts] for split, texts in self.texts.items()},
            "notes": sorted({*self.notes}),
        }

    def _scores(self, flow: Any, split: Any) -> list[Json]:
        config = self.config
        configuration = Configuration(dense_layers=tuple(config.dense_layers))
        baselines = {name: load_flow(name) for name in BASELINES}
        result = score(
            self.model,
            self.texts[split],
            [flow],
            config.budget,
            store=self.store,
            against=[*baselines.values()],
            configuration=configuration,
            dense=self.dense,
        )
        digests = {
            name: make_variant(other, name, self.model.spec, **dict(configuration)).digest
            for name, other in baselines.items()
        }
        return [row.model_dump(mode="json") for row in split_scores(result, digests)]


def split_scores(result: FlowScores, baselines: Mapping[str, str]) -> list[SplitScore]:
    """The figures of the submitted flow by budget, and their means over budgets.

    Paired by text with those of baselines (by digest).
    """
    rows = {(row.digest, row.budget): _by_text(row) for row in result.rows}
    own = [row for row in result.rows if row.submitted]
    parts: list[tuple[int | None, Sequence[FlowScore]]] = [(row.budget, [row]) for row in own]
    found = []
    for budget, part in [*parts, (None, own)]:
        mean = np.mean([rows[row.digest, row.budget] for row in part], axis=0)
        above = {
            name: _estimates(mean - np.mean([rows[digest, row.budget] for row in part], axis=0))
            for name, digest in baselines.items()
        }
        found.append(SplitScore(budget=budget, above=above, **_estimates(mean)))
    return found


def _by_text(row: FlowScore) -> np.ndarray:
    """Objectives by text, in the order of OBJECTIVES."""
    return np.array([row.p05_by_text, row.mean_by_text, row.hard_misses_by_text])


def _estimates(by_text: np.ndarray) -> dict[Objective, Estimate]:
    """Means of all objectives; without an interval where texts are few."""
    found: dict[Objective, Estimate] = {}
    for name, values in zip(OBJECTIVES, by_text, strict=True):
        mean, low, high = interval("mean", values).values()
        known = (low, high) if len(values) >= LEAST else (None, None)
        found[name] = Estimate(value=mean, low=known[0], high=known[1])
    return found
