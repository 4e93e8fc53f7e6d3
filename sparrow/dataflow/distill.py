"""`sparrow distill`: fit the adapter of a sparse actor offline, in a folder that can be resumed.

measured.jsonl          sequences of the sparse actor, and acceptance before
checkpoints/            adapter, moments and looks, after every look
refresh/                sequences of the actor with the adapter so far
after/                  acceptance with the adapter
actor/, distill.json    the result
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibration.calibration import Collector
from sparrow.calibration.cells import Tokens, cells, hard_miss_rate, tail_interval
from sparrow.calibration.drafts import DRAFTS, measure_drafts
from sparrow.calibration.replay import TOP_K, Arm, Prompt, make_arm, make_variant, teacher_force
from sparrow.calibration.store import Store, Trajectories
from sparrow.dataflow.calibrate import about, edges_for
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.prompts import PromptSet
from sparrow.engine.answer import load_schedule
from sparrow.engine.pool import PAGE
from sparrow.files import FolderLock, remove_unfinished
from sparrow.models import Decoder, fingerprint
from sparrow.models.actor import adapter_digest, base_digest, save_actor
from sparrow.models.lora import Adapter
from sparrow.models.sources import model_name
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.common import DecodingConfig
from sparrow.schema.distill import DistillArm, DistillConfig, DistillLook, DistillResult
from sparrow.schema.episode import TrainSample
from sparrow.schema.run_folder import ACTOR
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Cell, DraftCell
from sparrow.schema.types import Progress, Report
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule
from sparrow.training.distillation import Distiller
from sparrow.training.policy import Policy

RESULT, AFTER, REFRESH = "distill.json", "after", "refresh"
LAST_RATE = 0.1  # of the rate, at the last step
FITTED = ("rank", "rate", "divergence", "steps", "batch", "refresh")
SHOWN = (*FITTED, "attention", "temperature", "seed")


def distill(
    model: Decoder,
    source: PromptSet,
    config: DistillConfig,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
) -> DistillResult:
    """Fit the adapter and write it with the result; only one process may use the folder."""
    place, report = config.folder, report or (lambda text: None)
    schedule, flow = _schedule(config, model)
    place.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(place, setting="--out")):
        remove_unfinished(place)
        job = Distillation(model, source, config, schedule, flow, progress, report)
        result = job.run()
        save_actor(place / ACTOR, job.adapter, schedule, model, name=model_name(model))
        result.save(place / RESULT)
    return result


def _schedule(config: DistillConfig, model: Decoder) -> tuple[Schedule, Flow]:
    chosen = {"budget": config.budget, "schedule": config.schedule, "flow": config.flow}
    decoding = DecodingConfig.model_validate({"attention": chosen | {"force": config.force}})
    schedule, flow = load_schedule(decoding)
    assert schedule is not None, "a budget or a schedule is set"
    family = model.spec.family
    if config.force:
        names = {"flow": flow.name, "flow_digest": flow.digest}
        schedule = schedule.forced_onto(family=family, page=PAGE, **names)
    Rule.like(schedule, flow).check(schedule, page=PAGE, family=family)
    if config.draft_tokens:
        Rule.like(schedule, flow).check_drafts(config.draft_tokens, PAGE)
    return schedule, flow


@dataclass(kw_only=True)
class Fit:
    """The state of a fit in its checkpoints."""

    best: dict[str, Any]  # the adapter with the highest held-out p05, and its moments
    p05: float
    best_step: int = 0
    seconds: float = 0.0  # of steps
    refreshed: str = ""  # digest of the adapter that wrote the sequences
    distiller: dict[str, Any] = field(default_factory=dict)
    looks: list[dict[str, Any]] = field(default_factory=list)


class Distillation:
    """The parts of a distillation: measured before, fitted, measured after."""

    def __init__(
        self,
        model: Decoder,
        source: PromptSet,
        config: DistillConfig,
        schedule: Schedule,
        flow: Flow,
        progress: Progress | None,
        report: Report,
    ) -> None:
        self.model, self.source, self.config, self.report = model, source, config, report
        self.schedule, self.progress = schedule, progress
        self.rule = Rule.of(schedule, flow)
        held = config.held_out or max(1, len(source.prompts) // 4)
        count = len(source.prompts) - held
        if count < 1:
            raise ValueError(
                f"{len(source.prompts)} prompts, of which {held} are held out: none is left to "
                "distil on; set held_out"
            )
        self.train, self.held_out = source.prompts[:count], source.prompts[count:]
        names = ("page", "first", "last", "dense_layers")
        rules = {name: getattr(schedule, name) for name in names}
        variant = make_variant(flow, flow.name, model.spec, **rules)
        self.main = make_arm(variant, flow, config.budget, schedule=schedule)
        others = sorted({*config.report_budget} - {config.budget})
        self.arms = [self.main, *(make_arm(variant, flow, budget) for budget in others)]
        self.adapter = Adapter.random(
            model.spec,
            config.rank,
            modules=config.targets,
            b_std=0.0,
            seed=config.seed,
            device=model.device,
        )
        self.looks: list[DistillLook] = []

    def run(self) -> DistillResult:
        before = self._collector(self.config.folder, None)
        if self.source.mode == "generated":
            before.collect({self.main: len(self.source.prompts)})
        sequences = self._sequences(before)
        training, held_out = ([one for one in part if _is_long(one)] for part in sequences)
        if short := sum(map(len, sequences)) - len(training) - len(held_out):
            self.report(f"{short} answers have fewer than two tokens and are left out")
        if not training or not held_out:
            raise ValueError("no sequence of two tokens or more behind its prompt is left")
        longest = max(len(one.ids) for one in (*training, *held_out))
        if min(int(self.schedule.budget(length)) for length in (1, longest)) >= longest:
            self.report(f"the schedule keeps all of at most {longest} tokens: never sparse")
        measured = self._measure(before, held_out)
        asked = [weight.requires_grad for weight in self.model.parameters()]
        try:
            best, seconds = self._fit(training, held_out)
        finally:
            for weight, gradients in zip(self.model.parameters(), asked, strict=True):
                weight.requires_grad_(gradients)
        place = self.config.folder / AFTER / adapter_digest(self.adapter)
        after = self._collector(place, self.adapter)
        arms = [
            DistillArm(
                name=arm.name,
                budget=arm.budget,
                before=cells_before,
                after=cells_after,
                drafts_before=drafts_before,
                drafts_after=drafts_after,
            )
            for arm, (cells_before, drafts_before), (cells_after, drafts_after) in zip(
                self.arms, measured, self._measure(after, held_out), strict=True
            )
        ]
        return DistillResult(
            model=model_name(self.model),
            base=base_digest(self.model),
            schedule=self.schedule,
            mode=self.source.mode,
            prompts=self.source.name,
            trained_on=len(training),
            held_out=len(self.held_out),
            settings={name: getattr(self.config, name) for name in SHOWN},
            looks=tuple(self.looks),
            best=best,
            seconds=seconds,
            arms=tuple(arms),
        )

    # Measuring.

    def _collector(
        self, place: Path, actor: Adapter | None, digest: str | None = None
    ) -> Collector:
        """digest: that of the adapter whose measurements are there, if the actor has moved on."""
        weights = fingerprint(self.model)
        if actor is not None:
            weights += f"+{digest or adapter_digest(actor)}"
            actor = actor.to(self.model.dtype)
        store = Trajectories(place, about(self.model, weights, self.source, self.config))
        prompts, mode = self.source.prompts, self.source.mode
        return Collector(self.model, prompts, mode, self.config, store, self.progress, actor)

    def _sequences(self, collector: Collector) -> tuple[list[Prompt], list[Prompt]]:
        """What the sparse actor wrote, or what was given; of held-out prompts the first answer."""
        if self.source.mode == "forced":
            return [*self.train], [*self.held_out]

        training = self._written(collector, self.train, self.config.samples)
        return training, self._written(collector, self.held_out, 1)

    def _written(
        self, collector: Collector, prompts: Sequence[Prompt], samples: int
    ) -> list[Prompt]:
        answers = collector.measured(self.main, prompts)
        return [
            Prompt(
                number=one.prompt,
                name=f"answer {one.prompt}",
                ids=tuple(one.ids.tolist()),
                start=one.prompt_tokens,
            )
            for one in sorted(answers, key=lambda one: (one.prompt, one.sample))
            if one.sample < samples
        ]

    def _measure(
        self, collector: Collector, held_out: list[Prompt]
    ) -> list[tuple[tuple[Cell, ...], tuple[DraftCell, ...]]]:
        """Cells of every arm on the held-out prompts, by rollouts or teacher-forced, and drafts."""
        held = replace(collector, prompts=self.held_out)
        held.collect(dict.fromkeys(self.arms, len(self.held_out)))
        longest = max(len(prompt.ids) for prompt in self.source.prompts)
        if self.source.mode == "generated":
            longest += self.config.answer_tokens
        edges = edges_for(min(longest, self.model.spec.max_positions), self.config.bin)
        top_k = min(TOP_K, self.model.spec.vocabulary)
        found = []
        for arm in self.arms:
            tokens = held.tokens(arm, self.held_out)
            parts = [
                cell
                for bins in (edges, (edges[0], edges[-1]))
                for cell in cells(tokens, bins, arm.variant, arm.budget, top_k=top_k)
            ]
            found.append((tuple(parts), self._drafts(held, arm, held_out)))
        return found

    def _drafts(
        self, collector: Collector, arm: Arm, held_out: list[Prompt]
    ) -> tuple[DraftCell, ...]:
        if not self.config.draft_tokens:
            return ()
        return tuple(
            measure_drafts(
                self.model,
                held_out,
                [arm],
                Store(collector.store.file.with_name(DRAFTS)),
                draft_tokens=self.config.draft_tokens,
                temperature=self.config.temperature,
                progress=self.progress,
                actor=collector.actor,
            )
        )

    def _look(self, step: int, loss: float | None, held_out: list[Prompt]) -> DistillLook:
        """Acceptance on held-out sequences with the adapter as it is."""
        actor = self.adapter.to(self.model.dtype)
        measured = []
        for number, prompt in enumerate(held_out):
            if self.progress is not None:
                self.progress(number, len(held_out), f"held-out acceptance: step {step}")
            forced = teacher_force(self.model, prompt, [self.main], self.config.temperature, actor)
            measured += [sequence for _, sequence in forced]
        tokens = Tokens.of(measured)
        tail = tail_interval(tokens)
        return DistillLook(
            step=step,
            loss=loss,
            p05=tail.value,
            low=tail.low,
            high=tail.high,
            mean=float(tokens.alpha.mean(dtype=np.float64)),
            hard_misses=hard_miss_rate(tokens).value,
        )

    # Fitting.

    def _fit(self, given: list[Prompt], held_out: list[Prompt]) -> tuple[int, float]:
        """Take steps until held-out p05 stops rising; leave the best adapter, return its step."""
        config, distiller = self.config, self._distiller()
        checkpoints = Checkpoints(config.folder / "checkpoints", 1, report=self.report)
        identity = self._identity()
        step = checkpoints.latest() or 0
        if step:
            fit = Fit(**checkpoints.load(step, identity))
            distiller.restore(fit.distiller)
            self.looks = [from_dict(DistillLook, look) for look in fit.looks]
            self.report(f"{config.folder}: resuming after {step} steps")
        else:
            self.looks = [self._look(0, None, held_out)]
            fit = Fit(best=distiller.state(), p05=self.looks[0].p05)
        losses: list[float] = []
        training: list[TrainSample] = []
        while step < config.steps and step - fit.best_step < config.patience * config.check_every:
            if not training or (config.refresh and step % config.refresh == 0):
                training = self._training(given, step, fit)
            begun = time.monotonic()
            losses.append(self._step(distiller, training, step))
            fit.seconds += time.monotonic() - begun
            step += 1
            if self.progress is not None:
                self.progress(step, config.steps, f"distilling: divergence {losses[-1]:.4g}")
            if step % config.check_every and step < config.steps:
                continue
            look = self._look(step, float(np.mean(losses)), held_out)
            self.looks.append(look)
            losses = []
            self.report(
                f"step {step}: divergence {look.loss:.4g}, held-out p05 {look.p05:.3f}, "
                f"hard misses {look.hard_misses:.3g}"
            )
            if look.p05 > fit.p05:
                fit.best_step, fit.p05, fit.best = step, look.p05, distiller.state()
            fit.distiller, fit.looks = distiller.state(), list(map(to_dict, self.looks))
            checkpoints.save(step, vars(fit), identity)
        distiller.restore(fit.best)
        return fit.best_step, fit.seconds

    def _training(self, given: list[Prompt], step: int, fit: Fit) -> list[TrainSample]:
        """The sequences of a step: the first ones, or those of the last refresh before it."""
        refresh = self.config.refresh
        begin = step // refresh * refresh if refresh else 0
        if begin:
            if step == begin:
                fit.refreshed = adapter_digest(self.adapter)
            place = self.config.folder / REFRESH / f"step_{begin:06d}"
            collector = self._collector(place, self.adapter, fit.refreshed)
            collector = replace(collector, prompts=self.train)
            collector.collect({self.main: len(self.train)})
            given = self._written(collector, self.train, self.config.samples)
        return [_sample(one) for one in given if _is_long(one)]

    def _distiller(self) -> Distiller:
        config = self.config
        self.model.requires_grad_(False)
        recompute = self.model.device.type == "cuda"
        return Distiller(
            Policy(self.model, dtype=self.model.dtype, recompute=recompute),
            self.adapter,
            rate=config.rate,
            tokens=config.batch_tokens,
            divergence=config.divergence,
            temperature=config.temperature,
        )

    def _step(self, distiller: Distiller, training: list[TrainSample], step: int) -> float:
        """Take a step and return its divergence; under dense attention in the control."""
        config, schedule = self.config, self.schedule
        if config.attention == "dense":
            whole = np.full_like(schedule.budgets, self.model.spec.max_positions)
            schedule = schedule.replace(budgets=whole, layers=())
        for group in distiller.optimiser.param_groups:
            group["lr"] = config.rate * (1 - (1 - LAST_RATE) * step / config.steps)
        update = distiller.step(self._batch(training, step), schedule, self.rule)
        if update.skipped:
            figures = f"divergence {update.divergence:g}, gradient {update.gradient:g}"
            raise ValueError(f"step {step}: {figures}; lower the rate")
        return update.divergence

    def _batch(self, training: list[TrainSample], step: int) -> list[TrainSample]:
        """The sequences of a step: all in a random order, again and again."""
        size, count = min(self.config.batch, len(training)), len(training)
        places = range(step * size, (step + 1) * size)
        orders = {
            epoch: np.random.default_rng((self.config.seed, epoch)).permutation(count)
            for epoch in {place // count for place in places}
        }
        return [training[orders[place // count][place % count]] for place in places]

    def _identity(self) -> str:
        """A digest of what must not change when a distillation is resumed."""
        shown = {"out", "device", "patience", "report_budget", "draft_tokens", "bin"}
        settings = self.config.model_dump_json(exclude={*shown, "batch_tokens", "schedule"})
        schedule, digest = to_dict(self.schedule), base_digest(self.model)
        text = f"{settings} {schedule} {digest} {self.source.digest}"
        return hashlib.sha256(text.encode()).hexdigest()


def _is_long(sequence: Prompt) -> bool:
    return len(sequence.ids) - (sequence.start or 1) >= 2


def _sample(sequence: Prompt) -> TrainSample:
    length, start = len(sequence.ids), sequence.start or 1
    return TrainSample(
        ids=np.array(sequence.ids, np.int32),
        loss_mask=np.arange(length) >= start,
        rollout_logprob=np.zeros(length, np.float32),
        advantage=0.0,
    )
