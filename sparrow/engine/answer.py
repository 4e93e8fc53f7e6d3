"""Generate completions of prompts with the engine, and of text: `sparrow generate`.

    for number, output in outputs(engine, queries): ...

`answer` is `sparrow generate`: a run directory, if there is one, gets the resolved configuration
and one JSON line per completion.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sparrow.engine.engine import Engine, describe_model, describe_ops
from sparrow.engine.language import Language
from sparrow.engine.loop import Output
from sparrow.engine.pool import PAGE
from sparrow.engine.text import Detokenizer
from sparrow.models import Decoder, load, load_tokenizer, provenance
from sparrow.schema.base import to_dict
from sparrow.schema.common import DecodingConfig, GenerateConfig
from sparrow.schema.loading import save_resolved
from sparrow.schema.sampling import (
    Completion,
    Completions,
    OutputOptions,
    SamplingParams,
    SpeculativeParams,
)
from sparrow.schema.schedule import Schedule
from sparrow.sparse import named_schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.loading import load_flow, resolve_flow
from sparrow.sparse.rule import Rule

COMPLETIONS = "completions.jsonl"
MOST_AT_ONCE = 64
OnText = Callable[[int, str], None]


class Query(NamedTuple):
    """A prompt in tokens with its sampling parameters, decoding and output options."""

    ids: Sequence[int]
    params: SamplingParams
    schedule: Schedule | None = None  # None: dense
    options: OutputOptions | None = None
    speculative: SpeculativeParams | None = None  # exact: the schedule is that of the drafts


def outputs(
    engine: Engine, queries: Sequence[Query], *, streamed: bool = False, ahead: int | None = None
) -> Iterator[tuple[int, Output]]:
    """Yield the engine's outputs for queries as they come, each with the number of its query.

    streamed: yield tokens too, not only completions. ahead: most queries in the engine at once.
    Closing the generator early aborts the rest.
    """
    waiting = list(enumerate(queries))[::-1]
    most = len(waiting) if ahead is None else ahead
    running: dict[int, tuple[int, int]] = {}  # by request: its query, and samples that still run
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number, query = waiting.pop()
                settings = query._asdict()
                ids, params = settings.pop("ids"), settings.pop("params")
                request = engine.add(ids, params, **settings, streamed=streamed)
                running[request] = (number, params.n)
            for output in engine.step():
                if output.request not in running:
                    continue
                number, left = running[output.request]
                left -= output.completion is not None
                running[output.request] = (number, left)
                if not left:
                    del running[output.request]
                yield number, output
    finally:
        for request in running:
            engine.abort(request)


def answer(
    config: GenerateConfig,
    *,
    report: Callable[[str], None],
    loaded: Decoder | None = None,
    on_text: OnText | None = None,
) -> Completions:
    """Generate completions of a configuration's prompts, with their text.

    `report` gets a description of the run, `on_text(row, piece)` pieces of text as they come.
    """
    folder, name, sampling = config.run.out, config.model.name, config.sampling
    if folder is not None and (folder / COMPLETIONS).exists():
        raise ValueError(f"{folder / COMPLETIONS} exists; choose another run directory")
    load_schedule(config)  # reports errors before the model is loaded
    place: dict[str, Any] = {"dtype": config.model.dtype, "device": config.model.device}
    model = load(name, **place, report=report) if loaded is None else loaded
    language = Language(load_tokenizer(model.source or name), name, config.chat)
    decoding = resolve_decoding(config, model.spec.family)
    if folder is not None:
        save_resolved(config, folder)
    report(
        f"{name} ({provenance(model)}) | {describe_model(model)} | attention: "
        f"{decoding.describe()} | {describe_ops(model)}"
    )
    chats = [config.messages] if config.messages else config.prompts
    prompts = [language.encode(prompt, raw=config.raw) for prompt in chats]
    engine = Engine(  # just large enough; for a reader, so single answers need not be padded
        model,
        max_running=min(MOST_AT_ONCE, len(prompts) * sampling.n),
        max_context=min(max(map(len, prompts)) + sampling.max_tokens, model.spec.max_positions),
        rule=decoding.rule or Rule(),
        speculative=decoding.speculative,
        exact_batches=False,
    )
    queries = [Query(ids, sampling, **decoding.request) for ids in prompts]
    completions = _complete(engine, queries, language, on_text)
    if folder is not None:
        with (folder / COMPLETIONS).open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(to_dict(completion)) + "\n" for completion in completions)
    return completions


def _complete(
    engine: Engine, queries: Sequence[Query], language: Language, on_text: OnText | None
) -> Completions:
    """Run the queries to their end; return the completions with their text, query by query."""
    texts: dict[int, Detokenizer] = defaultdict(lambda: Detokenizer(language.decode))
    done: dict[tuple[int, int], Completion] = {}
    for number, output in outputs(engine, queries, streamed=on_text is not None):
        row = number * queries[number].params.n + output.sample
        if on_text is not None:
            piece = texts[row].feed(output.tokens)
            piece += texts[row].finish() if output.completion is not None else ""
            if piece:
                on_text(row, piece)
        if output.completion is not None:
            text = language.decode(output.completion.token_ids.tolist())
            done[number, output.sample] = output.completion.replace(text=text)
    return Completions(done[key] for key in sorted(done))


class ResolvedDecoding(NamedTuple):
    """The schedule of requests with its flow (None: dense), and how its drafts are verified."""

    schedule: Schedule | None = None
    flow: Flow = block_mean
    speculative: SpeculativeParams | None = None
    adapter: str = ""  # of the sparse actor, for descriptions

    @property
    def rule(self) -> Rule | None:
        return None if self.schedule is None else Rule.of(self.schedule, self.flow)

    def describe(self) -> str:
        """Describe the attention of requests in a line."""
        attention = "dense" if self.schedule is None else self.schedule.describe()
        attention += f", adapter {self.adapter}" if self.adapter else ""
        return attention if self.speculative is None else self.speculative.describe(attention)

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of a request to an engine."""
        return {"schedule": self.schedule, "speculative": self.speculative}


DENSE = ResolvedDecoding()


def load_schedule(config: DecodingConfig) -> tuple[Schedule | None, Flow]:
    """Return the schedule of a configuration (a budget, a preset or a file) with its flow.

    None: dense.
    """
    attention = config.attention
    unset = attention.budget is None and attention.schedule is None
    if unset or config.decoding == "dense":
        return None, block_mean
    if attention.schedule is not None:
        schedule = named_schedule(attention.schedule)
        return schedule, resolve_flow(schedule, attention.flow, force=attention.force)
    assert attention.budget is not None
    flow = load_flow(attention.flow or "block_mean")
    own = {} if flow is block_mean else {"flow": flow.name, "flow_digest": flow.digest}
    return Schedule.fixed(attention.budget, **own), flow


def resolve_decoding(config: DecodingConfig, family: str) -> ResolvedDecoding:
    """Return the schedule of a configuration with its flow, checked for this model family."""
    schedule, flow = load_schedule(config)
    if schedule is None:
        return DENSE
    if config.attention.force:
        place = {"flow": flow.name, "flow_digest": flow.digest, "page": PAGE}
        schedule = schedule.forced_onto(family=family, **place)
    Rule.like(schedule, flow).check(schedule, page=PAGE, family=family)
    if config.decoding != "exact":
        return ResolvedDecoding(schedule, flow)
    Rule.like(schedule, flow).check_drafts(config.speculative.draft_tokens, PAGE)
    return ResolvedDecoding(schedule, flow, config.speculative)
