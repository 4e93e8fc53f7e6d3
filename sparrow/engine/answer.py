"""Generate completions with the engine, and convert between text and token ids.

    for number, output in outputs(engine, queries): ...

`answer` is `sparrow generate`: a run directory, if there is one, gets the resolved configuration
and one JSON line per completion.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sparrow.engine.engine import Engine, describe_model, describe_ops
from sparrow.engine.loop import Output
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder, load, load_tokenizer, provenance
from sparrow.models.tokenizer import library_errors
from sparrow.schema.base import to_dict
from sparrow.schema.common import AttentionConfig, ChatConfig, GenerateConfig
from sparrow.schema.loading import save_resolved
from sparrow.schema.sampling import Completion, Completions, OutputOptions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse import named_schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.loading import resolve_flow
from sparrow.sparse.rule import Rule

COMPLETIONS = "completions.jsonl"
NO_CHAT = ChatConfig()
MOST_AT_ONCE = 64
OnText = Callable[[int, str], None]


class Query(NamedTuple):
    """A prompt in tokens with its sampling parameters, schedule and output options."""

    ids: Sequence[int]
    params: SamplingParams
    schedule: Schedule | None = None  # None: dense
    options: OutputOptions | None = None


def outputs(
    engine: Engine,
    queries: Sequence[Query],
    *,
    streamed: bool = False,
    ahead: int | None = None,
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
                number, (ids, params, schedule, options) = waiting.pop()
                request = engine.add(
                    ids, params, schedule=schedule, options=options, streamed=streamed
                )
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
    folder = config.run.out
    if folder is not None and (folder / COMPLETIONS).exists():
        raise ValueError(f"{folder / COMPLETIONS} exists; choose another run directory")
    schedule_of(config.attention)  # reports errors before the model is loaded
    name, sampling = config.model.name, config.sampling
    place: dict[str, Any] = {"dtype": config.model.dtype, "device": config.model.device}
    model = load(name, **place, report=report) if loaded is None else loaded
    tokenizer = load_tokenizer(model.source or name)
    schedule, flow = placed_schedule(config.attention, model.spec.family)
    if folder is not None:
        save_resolved(config, folder)
    report(
        f"{name} ({provenance(model)}) | {describe_model(model)} | "
        f"attention: {'dense' if schedule is None else schedule.describe()} | "
        f"{describe_ops(model)}"
    )

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    prompts = _encoded_prompts(tokenizer, config)
    engine = Engine(  # just large enough; for a reader, so single answers need not be padded
        model,
        max_running=min(MOST_AT_ONCE, len(prompts) * sampling.n),
        max_context=min(max(map(len, prompts)) + sampling.max_tokens, model.spec.max_positions),
        rule=Rule() if schedule is None else Rule.of(schedule, flow),
        exact_batches=False,
    )
    queries = [Query(ids, sampling, schedule) for ids in prompts]
    stream = None if on_text is None else _Stream(decode, on_text)
    done: dict[int, Completion] = {}
    for number, output in outputs(engine, queries, streamed=stream is not None):
        row = number * sampling.n + output.sample
        if stream is not None:
            stream.take(row, output.tokens)
        if output.completion is not None:
            text = decode(output.completion.token_ids.tolist())
            done[row] = output.completion.replace(text=text)
    if stream is not None:
        stream.finish()
    completions = Completions(done[row] for row in sorted(done))
    if folder is not None:
        with (folder / COMPLETIONS).open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(to_dict(completion)) + "\n" for completion in completions)
    return completions


def _encoded_prompts(tokenizer: Any, config: GenerateConfig) -> list[list[int]]:
    """Encode the prompts of a configuration, or its chat."""
    about: dict[str, Any] = {"model": config.model.name, "settings": config.chat}
    if config.messages:
        return [encode_messages(tokenizer, config.messages, **about)]
    about["chat"] = not config.raw
    return [encode_prompt(tokenizer, text, **about) for text in config.prompts]


class _Stream:
    """Streaming detokenizer: a piece is held back while a character is incomplete.

    A piece is the difference that new tokens make to the text of a short window before them.
    """

    def __init__(self, decode: Callable[[list[int]], str], on_text: OnText) -> None:
        self.decode, self.on_text = decode, on_text
        self.held: dict[int, list[int]] = defaultdict(list)
        self.window: dict[int, list[int]] = defaultdict(list)

    def take(self, row: int, tokens: Sequence[int]) -> None:
        self.held[row] += tokens
        piece = self._piece(row)
        if piece and not piece.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(row, piece)

    def finish(self) -> None:
        """Emit what is still held back."""
        for row in self.held:
            if piece := self._piece(row):
                self._show(row, piece)

    def _piece(self, row: int) -> str:
        before = self.decode(self.window[row])
        return self.decode(self.window[row] + self.held[row])[len(before) :]

    def _show(self, row: int, piece: str) -> None:
        self.on_text(row, piece)
        self.window[row], self.held[row] = self.held[row], []


def schedule_of(attention: AttentionConfig) -> Schedule | None:
    """Return the schedule of a configuration: a budget, a preset or a file; None: dense."""
    if attention.dense:
        return None
    if attention.budget is not None:
        return Schedule.fixed(attention.budget)
    return None if attention.schedule is None else named_schedule(attention.schedule)


def placed_schedule(attention: AttentionConfig, family: str) -> tuple[Schedule | None, Flow]:
    """Return the schedule of a configuration with its flow, checked for this model family."""
    schedule = schedule_of(attention)
    if schedule is None:
        return None, block_mean
    flow = resolve_flow(schedule, attention.flow, force=attention.force)
    if attention.force:
        place = {"flow": flow.name, "flow_digest": flow.digest, "page": PAGE}
        schedule = schedule.forced_onto(family=family, **place)
    Rule.like(schedule, flow).check(schedule, page=PAGE, family=family)
    return schedule, flow


# Text to token ids.

ANSWER = "<the answer of the assistant>"  # stands in a rendered chat for what was sampled


def encode_prompt(
    tokenizer: Any, prompt: str, *, chat: bool, model: str, settings: ChatConfig = NO_CHAT
) -> list[int]:
    """Encode a prompt, as a user message if the model has a chat template."""
    if not prompt:
        raise ValueError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {prompt!r} is not valid UTF-8") from error
    if chat and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        return encode_messages(tokenizer, messages, model=model, settings=settings)
    if settings != NO_CHAT:
        missing = "raw prompts have" if tokenizer.chat_template else f"{model} has"
        raise ValueError(f"{missing} no chat template, so chat.system and chat.template do nothing")
    return _token_ids(tokenizer, prompt, model)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    model: str,
    settings: ChatConfig = NO_CHAT,
) -> list[int]:
    """Encode a chat up to where the answer begins.

    settings: the system prompt, for chats that do not begin with one, and template arguments.
    """
    text = _rendered(tokenizer, messages, model, settings)
    return _token_ids(tokenizer, text, model, add_special_tokens=False)


def encode_plain(tokenizer: Any, text: str, *, model: str) -> list[int]:
    """Encode plain text: no chat template, no special tokens around it."""
    return _token_ids(tokenizer, text, model, add_special_tokens=False)


def encode_turn(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    model: str,
    settings: ChatConfig = NO_CHAT,
) -> list[int]:
    """Encode what the chat template puts between an answer and the next.

    It begins with what closes the answer, such as an end-of-turn token.
    """
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    alone, followed = (
        _rendered(tokenizer, [*chat, *more], model, settings).rpartition(ANSWER)
        for more in ([], messages)
    )
    if not followed[1] or followed[2] == alone[2]:
        roles = ", ".join(repr(message.get("role")) for message in messages)
        raise ValueError(f"{model}: the chat template leaves out messages of role {roles}")
    return encode_plain(tokenizer, followed[2], model=model)


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str, settings: ChatConfig
) -> str:
    """Return the text of a chat up to where the answer begins."""
    if tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template, so it cannot read chat messages")
    chat, system = [dict(message) for message in messages], settings.system
    if system is not None and chat[0].get("role") == "system":
        system = None  # the chat has its own
    if system is not None:
        chat.insert(0, {"role": "system", "content": system})
    _check_arguments(tokenizer, model, settings.template)
    with library_errors(f"{model}: bad chat template, or one that refuses these messages"):
        text = str(
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **settings.template
            )
        )
    if system is not None and system.strip() not in text:
        raise ValueError(f"{model}: the chat template ignores system messages (chat.system)")
    return text


def _check_arguments(tokenizer: Any, model: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the chat template does not mention, or that would replace others."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    for name in arguments:
        used = any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)
        if not used or name in ("messages", "add_generation_prompt", "tools", "documents"):
            raise ValueError(f"{model}: the chat template has no argument {name!r} (chat.template)")


def _token_ids(tokenizer: Any, text: str, model: str, **options: bool) -> list[int]:
    try:
        with library_errors(f"{model}: the tokenizer cannot encode the prompt"):
            return list(tokenizer.encode(text, verbose=False, **options))
    except ValueError as error:
        if type(error.__cause__) is not Exception:  # tokenizers raise that for unknown words
            raise
        vocabulary = tokenizer.get_vocab()
        unknown = [word for word in text.split() if word not in vocabulary]
        raise ValueError(
            f"{model} has no tokens for {', '.join(map(repr, unknown[:5]))} ({error.__cause__}); "
            "the shipped models read puzzles only, such as: sparrow puzzle assignments"
        ) from error
