"""Requests of the OpenAI-compatible server, `/v1/completions` and `/v1/chat/completions`.

A documented key is a field (supported, or accepted without effect) or an entry of `refused`: what
would change the answer and is not supported. Every other key is refused too. An explicit null means
that the key is absent. `PARAMETERS` lists all keys with their status.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from sparrow.files import parse_json, printable, strings
from sparrow.schema.base import FieldError, Record
from sparrow.schema.common import Integer
from sparrow.schema.options import bare
from sparrow.schema.sampling import (
    LEAST_TEMPERATURE,
    Acceptance,
    Decoding,
    DraftTokens,
    Int31,
    MaxTokens,
    Samples,
    SamplingParams,
    StopTokenIds,
    TopP,
)
from sparrow.schema.types import MOST_ANSWERS, Budget, Name

MOST_STOPS = 16  # OpenAI: 4
MOST_LOGPROBS = 20  # of OpenAI's completions: 5
MOST_DEPTH = 64  # of nested objects and lists
SHOWN = 80  # characters of a value in a message

Status = Literal["supported", "accepted", "refused"]


# Errors.


class RequestError(ValueError):
    """Raised for a request that is refused, with what an OpenAI error object needs.

    param: path of the key, such as "messages[2].content"; None: the body as a whole.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Refusal(FieldError):
    """Raised by a validator to refuse a key with a code; `parse_request` adds the path."""

    def __init__(self, code: str, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.code = code


SENTENCES = {
    "invalid_value": "'{param}' must be {allowed}, got {value}.",
    "unsupported_value": "'{param}' does not support {value}, allowed: {allowed}.",
    "unsupported_parameter": "'{param}' is not supported, got {value}, allowed: {allowed}.",
    "unknown_parameter": "Unknown parameter '{param}', got {value}, allowed: {allowed}.",
    "missing_required_parameter": "Missing required parameter '{param}'{allowed}.",
}
ALLOWED = {  # by pydantic's type of an error
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "a list",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length} items",
    "string_too_short": "a string that is not empty",
    "literal_error": "{expected}",
    "missing": "",
}
CODES = {"missing": "missing_required_parameter", "literal_error": "unsupported_value"}


def _first_error(error: ValidationError) -> RequestError:
    """Describe pydantic's first error in the words of the API."""
    detail = error.errors(include_url=False)[0]
    kind, context = detail["type"], detail.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, FieldError):
        code = getattr(cause, "code", "invalid_value")
        return _request_error(code, (*detail["loc"], cause.field), cause.value, cause.allowed)
    allowed = ALLOWED[kind].format(**context) if kind in ALLOWED else str(cause or detail["msg"])
    return _request_error(CODES.get(kind, "invalid_value"), detail["loc"], detail["input"], allowed)


def _request_error(
    code: str, location: tuple[str | int, ...], value: object, allowed: str
) -> RequestError:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}" for part in location)
    param = printable("".join(parts).removeprefix("."))
    message = SENTENCES[code].format(param=param, value=_shown(value), allowed=allowed)
    return RequestError(message, param, code)


def _shown(value: object) -> str:
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=dict).iterencode(value):
        text += piece
        if len(text) > SHOWN:
            break
    text = printable(text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _check_json(data: Any) -> None:
    """Refuse deep nesting, NaN, lone surrogates, and integers of thousands of digits."""
    level, depth = [[data]], 0
    while level := [inner for value in level for inner in _containers(value)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise RequestError(f"The body must be nested at most {MOST_DEPTH} levels deep.")
    try:
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        places = (place for place, text in strings(data) if re.search("[\ud800-\udfff]", text))
        param = printable(next(places, ""))[: 2 * SHOWN] or None
        place = f"'{param}'" if param else "Every key"
        raise RequestError(f"{place} must be valid Unicode, got a lone surrogate.", param) from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"The body must be JSON: {error}.") from None


def _containers(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value
    if set(map(type, values)) <= {int, str}:  # fast for long lists of tokens
        return []
    return [inner for inner in values if isinstance(inner, dict | list | tuple)]


# Keys.


class Parameter(NamedTuple):
    """Whether a key is supported, and what to know of it."""

    status: Status
    note: str


class Refused(NamedTuple):
    """A documented key that is not supported, but for values that cannot change the answer."""

    reason: str
    neutral: Any = None

    def accepts(self, value: Any) -> bool:
        """Whether the value is null or neutral; false is not 0."""
        same_kind = isinstance(value, bool) == isinstance(self.neutral, bool)
        return value is None or (same_kind and value == self.neutral)

    @property
    def allowed(self) -> str:
        values = ["null"] if self.neutral is None else [json.dumps(self.neutral), "null"]
        return " or ".join(values)


def key(default: Any, note: str, status: Status = "supported") -> Any:
    """Declare a key with a note for the table of parameters; default `...`: required."""
    return Field(default, description=note, json_schema_extra={"status": status})


def ignored(note: str) -> Any:
    """Declare a key that is accepted without effect."""
    return key(None, note, "accepted")


class Body(Record):
    """An object of a request: nulls are dropped, and keys that are not documented are refused."""

    refused: ClassVar[Mapping[str, Refused]] = {}

    @model_validator(mode="before")
    @classmethod
    def _documented(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if refused := cls.refused.get(name):
                allowed = f"{refused.allowed} ({refused.reason})"
                if not refused.accepts(value):
                    raise Refusal("unsupported_parameter", name, value, allowed)
            elif name not in cls.model_fields:
                raise Refusal("unknown_parameter", str(name), value, cls._suggest(str(name)))
        given = {name: value for name, value in values.items() if value is not None}
        return {name: value for name, value in given.items() if name not in cls.refused}

    @classmethod
    def _suggest(cls, name: str) -> str:
        if "sparrow" in cls.model_fields and name in SparrowOptions.model_fields:
            return f"'sparrow.{name}'"
        close = get_close_matches(name[:SHOWN], cls.model_fields, 1, cutoff=0.8)
        return f"'{close[0]}'" if close else "keys of the table in docs/serve.md"


def list_parameters(cls: type[Body], prefix: str = "") -> dict[str, Parameter]:
    """List the keys of a request, those of nested objects included, with status and note."""
    table = {}
    for name, field in cls.model_fields.items():
        extra: Any = field.json_schema_extra or {"status": "supported"}
        table[f"{prefix}{name}"] = Parameter(extra["status"], field.description or "")
        kind = bare(field.annotation)
        brackets = "[]" if get_origin(kind) is tuple else ""
        kind = bare(get_args(kind)[0]) if brackets else kind
        if isinstance(kind, type) and issubclass(kind, Body):
            table |= list_parameters(kind, f"{prefix}{name}{brackets}.")
    for name, refused in cls.refused.items():
        also = "" if refused.neutral is None else f"; `{json.dumps(refused.neutral)}` is accepted"
        table[f"{prefix}{name}"] = Parameter("refused", f"{refused.reason}{also}")
    return table


# Types.


def _temperature(value: float) -> float:
    if value != 0 and not LEAST_TEMPERATURE <= value <= 2:
        raise ValueError(f"0 (greedy) or a number from {LEAST_TEMPERATURE} to 2")
    return value


def _stops(value: Any) -> Any:
    texts = value if isinstance(value, list | tuple) else (value,)
    if len(texts) > MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"a string that is not empty, or a list of at most {MOST_STOPS} of them")
    return texts


def _prompts(value: Any) -> Any:
    """Return all forms of a prompt as several texts, or several tuples of token ids."""
    prompts = value if isinstance(value, list | tuple) else (value,)
    if isinstance(value, list | tuple) and value and type(value[0]) is int:
        prompts = (value,)
    texts = all(isinstance(prompt, str) and prompt for prompt in prompts)
    if not prompts or not (texts or all(map(_is_tokens, prompts))):
        forms = "a text, a list of texts, a list of token ids or a list of such lists"
        raise ValueError(f"{forms}, none of them empty and ids from 0 to {2**31 - 1}")
    return prompts


def _is_tokens(value: Any) -> bool:
    is_ids = isinstance(value, list | tuple) and set(map(type, value)) == {int}
    return is_ids and min(value) >= 0 and max(value) < 2**31


def _parts(value: Any) -> Any:
    if not isinstance(value, str | list | tuple):
        raise ValueError("a string or a list of text parts")
    return ({"type": "text", "text": value},) if isinstance(value, str) else value


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("a string, a number, true or false")
    return value


def _arguments(text: str) -> str:
    try:
        arguments = parse_arguments(text)
        _check_json(arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("the text of a JSON object")
    return text


def parse_arguments(text: str) -> Any:
    """Parse the arguments of a tool call; an empty text is an empty object."""
    return parse_json(text) if text.strip() else {}


NonEmpty = Annotated[str, Field(min_length=1)]
Object = dict[str, Any]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
SignedSeed = Annotated[Integer, AfterValidator(lambda seed: seed % 2**63)]
RequestTemperature = Annotated[float, AfterValidator(_temperature)]
StopTexts = Annotated[tuple[NonEmpty, ...], Field(max_length=MOST_STOPS)]
Stops = Annotated[
    tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=NonEmpty | StopTexts)
]
Tokens = Annotated[tuple[Int31, ...], Field(min_length=1)]
Texts = Annotated[tuple[NonEmpty, ...], Field(min_length=1)]
PromptForms = NonEmpty | Tokens | Texts | Annotated[tuple[Tokens, ...], Field(min_length=1)]
Prompts = Annotated[
    tuple[str, ...] | tuple[tuple[int, ...], ...],
    BeforeValidator(_prompts, json_schema_input_type=PromptForms),
]
Scalar = Annotated[bool | int | float | str, BeforeValidator(_scalar)]


# Parts of requests.


class SparrowOptions(Body):
    """Extensions of a request, under its key `sparrow`; None: as the server was started."""

    decoding: Decoding | None = key(None, "`dense`, `sparse` or `exact`; default: the server's")
    schedule: Name | Object | None = key(
        None, "name of a preset or of the server's schedule, or the content of a schedule file"
    )
    budget: Budget | None = key(None, "tokens that sparse attention keeps; excludes `schedule`")
    draft_tokens: DraftTokens | None = key(None, "drafts of a round of exact decoding, 1 to 64")
    acceptance: Acceptance | None = key(None, "of drafts: `rejection` or `shared_noise`")
    reselect: DraftTokens | None = key(None, "drafts that share the pages of the first, 1 to 64")
    return_token_ids: bool = key(False, "also return token ids of the prompt and the answer")
    hidden_states: bool = key(False, "also return the hidden state that each token was drawn from")
    top_k: Int31 = key(0, "sample from the k most likely tokens; 0 is off")
    min_tokens: Int31 = key(0, "no stop token before this many tokens")
    ignore_eos: bool = key(False, "the end-of-sequence token does not end the answer")
    stop_token_ids: StopTokenIds = key((), "token ids that end the answer, at most 4096")

    def _check(self) -> None:
        for name in ("budget", "schedule"):
            unused = self.decoding == "dense" and getattr(self, name) is not None
            self.require(not unused, name, "absent where decoding is 'dense'")
        both = self.budget is not None and self.schedule is not None
        self.require(not both, "schedule", "absent where budget is set")
        for name in ("draft_tokens", "acceptance", "reselect"):
            unused = self.decoding in ("dense", "sparse") and getattr(self, name) is not None
            self.require(not unused, name, "absent unless decoding is 'exact'")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = key(False, "a last chunk with the usage")
    include_obfuscation: bool | None = ignored("chunks are never padded")


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"] = key(..., "`text`")
    text: str = key(..., "parts are joined by line breaks")
    prompt_cache_breakpoint: Object | None = ignored("common prefixes are always cached")

    refused: ClassVar = {
        "image_url": Refused("models read text only"),
        "input_audio": Refused("models read text only"),
        "file": Refused("models read text only"),
        "refusal": Refused("chat templates have no refusals"),
    }


class CalledFunction(Body):
    """Name and arguments of a tool call."""

    name: NonEmpty
    arguments: Annotated[str, AfterValidator(_arguments)] = key(..., "text of a JSON object")


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = key("function", "`function`")
    function: CalledFunction

    refused: ClassVar = {"custom": Refused("only function tools")}

    def template_call(self) -> Object:
        """Return the call as Hugging Face chat templates read it: arguments are an object."""
        arguments = parse_arguments(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = key(
        ..., "`system`, `developer` (the same), `user`, `assistant` or `tool`"
    )
    content: Annotated[
        tuple[TextPart, ...] | None,
        BeforeValidator(_parts, json_schema_input_type=str | tuple[TextPart, ...] | None),
    ] = key(None, "text or text parts; assistant messages with calls or reasoning need none")
    name: str | None = key(None, "for chat templates that read it")
    tool_calls: tuple[ToolCall, ...] = key((), "of assistant messages")
    tool_call_id: str | None = key(None, "of tool messages, required")
    reasoning_content: str | None = key(None, "not OpenAI's: thinking of assistant messages")
    type: Literal["text"] | None = ignored("not OpenAI's: lm-eval sends `text`")

    refused: ClassVar = {
        "annotations": Refused("there is no web search", []),
        "audio": Refused("models read text only"),
        "function_call": Refused("deprecated, use `tool_calls`"),
        "refusal": Refused("chat templates have no refusals"),
    }

    def _check(self) -> None:
        roles = {
            "tool_calls": "assistant",
            "reasoning_content": "assistant",
            "tool_call_id": "tool",
        }
        for name, role in roles.items():
            unused = self.role != role and getattr(self, name)
            self.require(not unused, name, f"absent unless role is '{role}'")
        called = self.role == "assistant" and bool(self.tool_calls or self.reasoning_content)
        for name, optional in (("content", called), ("tool_call_id", self.role != "tool")):
            if getattr(self, name) is None and not optional:
                needed = f", which messages of role '{self.role}' need"
                raise Refusal("missing_required_parameter", name, None, needed)

    def template_message(self) -> Object:
        """Return the message as Hugging Face chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        message: Object = {"role": role, "content": "\n".join(p.text for p in self.content or ())}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.template_call() for call in self.tool_calls]
        return message


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: NonEmpty
    description: str | None = None
    parameters: Object | None = key(None, "a JSON schema; it does not constrain the answer")

    refused: ClassVar = {"strict": Refused("decoding is not constrained", False)}


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = key(..., "`function`")
    function: FunctionDefinition

    refused: ClassVar = {"custom": Refused("only function tools")}


# Requests.


class GenerationRequest(Body):
    """What requests of both endpoints share."""

    model: Name = key(..., "a name that `/v1/models` lists")
    max_tokens: Int31 | None = None
    n: Samples = key(1, "samples of each prompt")
    temperature: RequestTemperature = key(1.0, f"0 (greedy) or {LEAST_TEMPERATURE} to 2; default 1")
    top_p: TopP = key(1.0, "above 0, at most 1; default 1")
    stop: Stops = key((), f"a text or up to {MOST_STOPS} texts (OpenAI: 4), none of them empty")
    seed: SignedSeed | None = key(None, "any 64-bit integer; to negative ones 2^63 is added")
    stream: bool = key(False, "server-sent events")
    stream_options: StreamOptions | None = key(None, "only where `stream` is true")
    user: str | None = ignored("not used")
    sparrow: SparrowOptions = key(SparrowOptions(), "not OpenAI's: extensions, see below")

    refused: ClassVar = {
        "frequency_penalty": Refused("sampling has no penalties", 0),
        "logit_bias": Refused("sampling has no biases", {}),
        "presence_penalty": Refused("sampling has no penalties", 0),
    }

    @property
    def token_limit(self) -> int | None:
        """The most tokens to sample; None: as many as the context has room for."""
        return self.max_tokens

    def _check(self) -> None:
        unused = self.stream_options is not None and not self.stream
        self.require(not unused, "stream_options", "absent unless stream is true")
        least, most = self.sparrow.min_tokens, self.token_limit
        allowed = f"at most the limit of tokens, {most}"
        self.require(most is None or least <= most, "sparrow.min_tokens", allowed)

    def sampling(self, room: int) -> SamplingParams:
        """Return sampling parameters. room: the limit of tokens where the request sets none.

        The engine samples at least one token; it is to be dropped where `max_tokens` is 0.
        """
        limit = room if self.token_limit is None else self.token_limit
        names = ("top_k", "min_tokens", "ignore_eos", "stop_token_ids")
        options = {name: getattr(self.sparrow, name) for name in names}
        if options["min_tokens"] > limit:
            allowed = f"at most {limit}, for which the context has room"
            place = ("sparrow", "min_tokens")
            raise _request_error("invalid_value", place, options["min_tokens"], allowed)
        options |= {name: getattr(self, name) for name in ("n", "temperature", "top_p", "seed")}
        return SamplingParams(max_tokens=max(1, limit), **options)


class CompletionRequest(GenerationRequest):
    """A request of `/v1/completions`; all forms of `prompt` become a tuple of prompts."""

    prompt: Prompts = key(..., "text, texts, token ids or several lists of them; none empty")
    max_tokens: Int31 = key(16, "default 16; 0 only with `echo`, to score a prompt")
    echo: bool = key(False, "the prompt before the answer, also its log-probs")
    logprobs: Logprobs | None = key(None, f"0 to {MOST_LOGPROBS} (OpenAI: 5)")
    best_of: Samples | None = key(
        None, "answers are not ranked; a value equal to `n` is accepted", "refused"
    )

    refused: ClassVar = {
        **GenerationRequest.refused,
        "suffix": Refused("models do not infill"),
    }

    def _check(self) -> None:
        super()._check()
        needed = "at least 1, or 0 where echo is true"
        self.require(self.max_tokens > 0 or self.echo, "max_tokens", needed)
        most = MOST_ANSWERS // len(self.prompt)
        self.require(self.n <= most, "n", f"at most {most} with {len(self.prompt)} prompts")
        if self.best_of not in (None, self.n):
            allowed = f"{self.n}, which is n, or null (answers are not ranked)"
            raise Refusal("unsupported_parameter", "best_of", self.best_of, allowed)


class ChatRequest(GenerationRequest):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)] = key(..., "at least one")
    max_completion_tokens: MaxTokens | None = key(None, "default: what the context has room for")
    max_tokens: MaxTokens | None = key(None, "deprecated name of `max_completion_tokens`")
    logprobs: bool = key(False, "log-probs of the answer's tokens")
    top_logprobs: Logprobs | None = key(None, f"0 to {MOST_LOGPROBS}, with `logprobs`")
    tools: tuple[Tool, ...] = key((), "for the chat template; calls become `tool_calls`")
    tool_choice: Literal["auto", "none"] = key(
        "auto", "`auto` or `none` (the chat template gets no tools); others are refused"
    )
    chat_template_kwargs: dict[str, Scalar] = key(
        {}, "not OpenAI's: arguments of the chat template, such as `enable_thinking`"
    )
    metadata: Object | None = ignored("not used")
    prediction: Object | None = ignored("it can change the speed alone")
    prompt_cache_key: str | None = ignored("common prefixes are always cached")
    prompt_cache_options: Object | None = ignored("common prefixes are always cached")
    prompt_cache_retention: str | None = ignored("common prefixes are always cached")
    safety_identifier: str | None = ignored("not used")
    service_tier: str | None = ignored("there is one tier")
    store: bool | None = ignored("nothing is stored")

    refused: ClassVar = {
        **GenerationRequest.refused,
        "audio": Refused("models write text only"),
        "function_call": Refused("deprecated, use `tool_choice`"),
        "functions": Refused("deprecated, use `tools`"),
        "modalities": Refused("models write text only", ["text"]),
        "moderation": Refused("there is no moderation"),
        "parallel_tool_calls": Refused("the number of calls is not constrained", True),
        "reasoning_effort": Refused("use `chat_template_kwargs` if the chat template has it"),
        "response_format": Refused("decoding is not constrained", {"type": "text"}),
        "verbosity": Refused("models have no such setting"),
        "web_search_options": Refused("there is no web search"),
    }

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def _check(self) -> None:
        super()._check()
        limit = self.max_completion_tokens
        equal = limit is None or self.max_tokens in (None, limit)
        self.require(equal, "max_tokens", f"absent or equal to max_completion_tokens, {limit}")
        unused = self.top_logprobs and not self.logprobs
        self.require(not unused, "top_logprobs", "absent or 0 unless logprobs is true")

    def template_messages(self) -> list[Object]:
        """Return the messages as Hugging Face chat templates read them."""
        return [message.template_message() for message in self.messages]

    def template_tools(self) -> list[Object]:
        """Return the tools for the chat template; none where `tool_choice` is "none"."""
        tools = self.tools if self.tool_choice == "auto" else ()
        return [tool.model_dump(exclude_none=True) for tool in tools]


PARAMETERS = {
    "/v1/completions": list_parameters(CompletionRequest),
    "/v1/chat/completions": list_parameters(ChatRequest),
}

R = TypeVar("R", bound=Body)


def parse_request(cls: type[R], data: Any) -> R:
    """Make a request of JSON data, or of a body's bytes; RequestError if it is refused."""
    if isinstance(data, bytes):
        try:
            data = parse_json(data.decode())
        except ValueError as error:
            reason = printable(str(error))[: 2 * SHOWN]
            raise RequestError(f"The body must be JSON: {reason}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("The body must be a JSON object.")
    _check_json(data)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _first_error(error) from None
