"""Requests of the OpenAI-compatible server: what clients send passes, the rest is named.

`python tests/pure/schema/test_openai_requests.py` writes the tables of docs/serve.md.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparrow.files import printable
from sparrow.schema.openai import (
    MOST_DEPTH,
    PARAMETERS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    SparrowOptions,
    parse_request,
)
from sparrow.schema.sampling import SamplingParams

PAGE = Path(__file__).parents[3] / "docs/serve.md"
COMPLETION = {"model": "tiny", "prompt": "Once"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1]}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}

# Keys of openai/types/completion_create_params.py, openai/types/chat/completion_create_params.py
# and of the objects in them; openai 2.54.0 and 3.51.0 have the same.
DOCUMENTED = {
    "/v1/completions": """best_of echo frequency_penalty logit_bias logprobs max_tokens model n
        presence_penalty prompt seed stop stream stream_options suffix temperature top_p user""",
    "/v1/chat/completions": """audio frequency_penalty function_call functions logit_bias logprobs
        max_completion_tokens max_tokens messages metadata modalities model moderation n
        parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
        stop store stream stream_options temperature tool_choice tools top_logprobs top_p user
        verbosity web_search_options""",
    "stream_options.": "include_obfuscation include_usage",
    "messages[].": "audio content function_call name refusal role tool_call_id tool_calls",
    "messages[].content[].": "file image_url input_audio prompt_cache_breakpoint refusal text type",
    "messages[].tool_calls[].": "custom function id type",
    "messages[].tool_calls[].function.": "arguments name",
    "tools[].": "custom function type",
    "tools[].function.": "description name parameters strict",
}
OURS = {
    "/v1/completions": {"sparrow"},
    "/v1/chat/completions": {"sparrow", "chat_template_kwargs"},
    "messages[].": {"annotations", "reasoning_content", "type"},
}


def completion(**changes: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, COMPLETION | changes)


def chat(**changes: Any) -> ChatRequest:
    return parse_request(ChatRequest, CHAT | changes)


def message(**fields: Any) -> ChatRequest:
    return chat(messages=[*CHAT["messages"], fields])


def refusal(cls: type[GenerationRequest], data: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse_request(cls, data)
    return error.value


# The table.


def section() -> str:
    """Return the section "Parameters" of docs/serve.md."""
    introduction = (
        "The documented keys are those of the `openai` package, 2.54 and 3.51. *Accepted*: without "
        "effect. *Refused*: status 400 with an error that names the key. A key that is not listed "
        "is refused too; null is the same as leaving a key out."
    )
    lines = ["## Parameters", "", introduction]
    tables = {f"`{endpoint}`": rows.items() for endpoint, rows in PARAMETERS.items()}
    extensions = "Extensions, the keys of `sparrow` in both"
    tables[extensions] = PARAMETERS["/v1/completions"].items()
    for title, rows in tables.items():
        lines += ["", f"{title}:", "", "| parameter | status | notes |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {row.status} | {row.note} |"
            for name, row in sorted(rows)
            if name.startswith("sparrow.") == (title == extensions)
        ]
    return "\n".join(lines) + "\n"


def written(page: str) -> re.Match[str]:
    found = re.search(r"^## Parameters\n.*?(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    assert found, "docs/serve.md has no section Parameters"
    return found


def test_the_page_has_the_tables() -> None:
    text = written(PAGE.read_text(encoding="utf-8"))[0]
    assert text.rstrip() == section().rstrip(), f"out of date: run python {Path(__file__).name}"


@pytest.mark.parametrize("place", DOCUMENTED)
def test_every_documented_key_has_a_status(place: str) -> None:
    prefix = "" if place.startswith("/") else place
    table = PARAMETERS[place if place in PARAMETERS else "/v1/chat/completions"]
    names = {name.removeprefix(prefix) for name in table if name.startswith(prefix)}
    names = {name for name in names if "." not in name}
    assert names == {*DOCUMENTED[place].split(), *OURS.get(place, ())}


def test_notes_fit_into_a_table() -> None:
    for rows in PARAMETERS.values():
        assert not [row for row in rows.values() if re.search(r"[|\n]", row.note)]


# What clients send.


def test_scoring_as_lm_eval_does() -> None:
    request = completion(
        prompt=[[1, 2, 3], [4]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    assert request.prompt == ((1, 2, 3), (4,))
    assert completion(max_tokens=0, echo=True).sampling(9).max_tokens == 1
    told = [{"role": "user", "content": "Hi", "type": "text"}]
    assert chat(messages=told, stop=["\n\n"], max_tokens=256).token_limit == 256


def test_nulls_are_absent_keys() -> None:
    for name in DOCUMENTED["/v1/chat/completions"].split():
        if name not in ("model", "messages"):
            assert chat(**{name: None}) == chat()
    for name in DOCUMENTED["/v1/completions"].split():
        if name not in ("model", "prompt"):
            assert completion(**{name: None}) == completion()
    assert chat(sparrow={"budget": None}) == chat(sparrow=None) == chat()
    assert completion(max_tokens=None).token_limit == 16
    assert chat().token_limit is None


def test_an_answer_is_sent_back_as_the_client_dumps_it() -> None:
    dumped = {"content": None, "refusal": None, "role": "assistant", "annotations": None}
    dumped |= {"audio": None, "function_call": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]}
    request = chat(messages=[*CHAT["messages"], dumped, result], tools=[TOOL])
    call = {"id": "call_1", "type": "function", "function": {"name": "add"}}
    call["function"] |= {"arguments": {"a": [1]}}
    assert request.template_messages() == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    assert request.template_tools() == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").template_tools() == []
    json.dumps(request.template_messages())


def test_messages_for_chat_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message(role="developer", content=parts, name="Ann").template_messages()[1] == {
        "role": "system",
        "content": "a\nb",
        "name": "Ann",
    }
    thought = message(role="assistant", content=None, reasoning_content="hm", annotations=[])
    assert thought.template_messages()[1]["reasoning_content"] == "hm"
    empty = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    (call,) = message(role="assistant", tool_calls=[empty]).template_messages()[1]["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    request = completion(prompt=prompt)
    assert request.prompt == prompts
    assert request.replace(n=2).prompt == prompts


def test_keys_without_effect() -> None:
    request = chat(
        metadata={"a": "b"},
        store=True,
        user="u",
        service_tier="auto",
        prediction={"type": "content", "content": "x"},
        prompt_cache_options={"mode": "explicit"},
        frequency_penalty=0.0,
        presence_penalty=0,
        logit_bias={},
        modalities=["text"],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tools=[{"type": "function", "function": {"name": "f", "strict": False}}],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert request.stream_options.include_usage
    assert request.template_tools() == [{"type": "function", "function": {"name": "f"}}]
    assert completion(best_of=2, n=2).n == 2


def test_sampling_parameters() -> None:
    assert chat().sampling(100) == SamplingParams(max_tokens=100)
    options = {"top_k": 5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7]}
    request = chat(n=3, temperature=0, top_p=0.5, seed=-1, max_tokens=9, sparrow=options)
    assert request.sampling(100) == SamplingParams(
        n=3, temperature=0.0, top_p=0.5, max_tokens=9, seed=2**63 - 1, **options
    )
    with pytest.raises(RequestError, match=r"'sparrow\.min_tokens' must be at most 4"):
        chat(sparrow={"min_tokens": 5}).sampling(4)


def test_stops_are_a_tuple() -> None:
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=[]).stop == ()
    assert len(chat(stop=["a"] * 16).stop) == 16


# What is refused.


UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"
MISSING = "missing_required_parameter"
REFUSED_IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"functions": []}, "functions", UNSUPPORTED),
    ({"frequency_penalty": 0.5}, "frequency_penalty", UNSUPPORTED),
    ({"presence_penalty": False}, "presence_penalty", UNSUPPORTED),
    ({"logit_bias": {"5": 1}}, "logit_bias", UNSUPPORTED),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "unsupported_value"),
    (
        {"tools": [TOOL, {"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[1].function.strict",
        UNSUPPORTED,
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].custom", UNSUPPORTED),
    ({"tools": [{"type": "other"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [5]}, "tools[0]", INVALID),
    ({"top_k": 5}, "top_k", "unknown_parameter"),
    ({"temprature": 5}, "temprature", "unknown_parameter"),
    ({"x\x1b" * 100: 5}, "x\\x1b" * 40, "unknown_parameter"),
    ({"sparrow": {"flow": "x"}}, "sparrow.flow", "unknown_parameter"),
    ({"sparrow": {"budget": 96, "schedule": "a"}}, "sparrow.schedule", INVALID),
    ({"sparrow": {"budget": 96, "decoding": "dense"}}, "sparrow.budget", INVALID),
    ({"sparrow": {"draft_tokens": 4, "decoding": "sparse"}}, "sparrow.draft_tokens", INVALID),
    ({"sparrow": {"min_tokens": 4}, "max_tokens": 3}, "sparrow.min_tokens", INVALID),
    ({"sparrow": {"decoding": "fast"}}, "sparrow.decoding", "unsupported_value"),
    ({"sparrow": {"stop_token_ids": [1, -1]}}, "sparrow.stop_token_ids[1]", INVALID),
    ({"sparrow": [1]}, "sparrow", INVALID),
    ({"messages": []}, "messages", INVALID),
    ({"messages": None}, "messages", MISSING),
    ({"messages": "Hi"}, "messages", INVALID),
    ({"n": 0}, "n", INVALID),
    ({"n": 1.0}, "n", INVALID),
    ({"n": True}, "n", INVALID),
    ({"n": 10**4000}, "n", INVALID),
    ({"temperature": 2.5}, "temperature", INVALID),
    ({"temperature": 1e-8}, "temperature", INVALID),
    ({"temperature": 10**4000}, "temperature", INVALID),
    ({"temperature": "1"}, "temperature", INVALID),
    ({"top_p": 0}, "top_p", INVALID),
    ({"seed": 2**63}, "seed", INVALID),
    ({"stop": ""}, "stop", INVALID),
    ({"stop": ["a"] * 17}, "stop", INVALID),
    ({"stop": [None]}, "stop", INVALID),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", INVALID),
    ({"top_logprobs": 2}, "top_logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"logprobs": 1}, "logprobs", INVALID),
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a", INVALID),
    ({"model": "a\nb"}, "model", INVALID),
    ({"model": ""}, "model", INVALID),
    ({"store": "yes"}, "store", INVALID),
    ({"metadata": []}, "metadata", INVALID),
    ({"user": "a\ud800"}, "user", INVALID),
    ({"a\ud800": 1}, None, INVALID),
    ({"temperature": float("nan")}, None, INVALID),
    ({"metadata": {"a": 10**5000}}, None, INVALID),
    ({"metadata": {1: 2}}, "metadata[1].[key]", INVALID),
    ({5: 2}, "5", "unknown_parameter"),
    ({"metadata": {"a": {1}}}, None, INVALID),
]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
BAD_ARGUMENTS = ["[1]", "{", "NaN", '{"a": NaN}', "[" * 10**5, '{"a": "\\ud800"}', "9" * 5000]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"content": "a"}, "role", MISSING),
    ({"role": "function", "content": "a", "name": "f"}, "role", "unsupported_value"),
    ({"role": "user"}, "content", MISSING),
    ({"role": "user", "content": None}, "content", MISSING),
    ({"role": "user", "content": 5}, "content", INVALID),
    ({"role": "user", "content": ["a"]}, "content[0]", INVALID),
    ({"role": "user", "content": [{"text": "a"}]}, "content[0].type", MISSING),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
        "content[1].image_url",
        UNSUPPORTED,
    ),
    ({"role": "assistant"}, "content", MISSING),
    ({"role": "assistant", "content": "a", "refusal": "no"}, "refusal", UNSUPPORTED),
    ({"role": "assistant", "content": "a", "audio": {"id": "1"}}, "audio", UNSUPPORTED),
    ({"role": "assistant", "content": "a", "parsed": None}, "parsed", "unknown_parameter"),
    ({"role": "tool", "content": "a"}, "tool_call_id", MISSING),
    ({"role": "user", "content": "a", "tool_calls": [CALL]}, "tool_calls", INVALID),
    ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id", INVALID),
    ({"role": "system", "content": "a", "reasoning_content": "b"}, "reasoning_content", INVALID),
    *(
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
            },
            "tool_calls[0].function.arguments",
            INVALID,
        )
        for arguments in [*BAD_ARGUMENTS, {}, 5]
    ),
]
REFUSED_IN_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ({"prompt": None}, "prompt", MISSING),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"logprobs": 21}, "logprobs", INVALID),
    ({"prompt": ["a"] * 2**10, "n": 2**10 + 1}, "n", INVALID),
    *(
        ({"prompt": prompt}, "prompt", INVALID)
        for prompt in ["", [], [[]], ["a", 1], [1, "a"], [True], [-1], [2**31], [["a"]], 5, {}]
    ),
]
REFUSED = [
    *((ChatRequest, CHAT | changes, param, code) for changes, param, code in REFUSED_IN_CHAT),
    *(
        (
            ChatRequest,
            CHAT | {"messages": [*CHAT["messages"], fields]},
            f"messages[1].{param}",
            code,
        )
        for fields, param, code in REFUSED_MESSAGES
    ),
    *(
        (CompletionRequest, COMPLETION | changes, param, code)
        for changes, param, code in REFUSED_IN_COMPLETIONS
    ),
]
JARGON = re.compile(r"pydantic|should|validat|tuple|\bdict|http|Error|instance|None|True|False")


def check_text(error: RequestError) -> None:
    """Check that an error is one readable sentence that names its key."""
    text = str(error)
    assert text.endswith(".")
    assert len(text) < 500
    assert printable(text) == text
    assert not JARGON.search(text.replace("http://x", "")), text
    check_param(error)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_refusal_names_the_key(number: int) -> None:
    cls, data, param, code = REFUSED[number]
    error = refusal(cls, data)
    assert (error.param, error.code) == (param, code), str(error)
    check_text(error)


def test_the_words_of_refusals() -> None:
    texts = {
        "'temperature' must be 0 (greedy) or a number from 0.001 to 2, got 3.": {"temperature": 3},
        '\'response_format\' is not supported, got {"type": "json_object"}, allowed: '
        '{"type": "text"} or null (decoding is not constrained).': {
            "response_format": {"type": "json_object"}
        },
        "'tool_choice' does not support \"required\", allowed: 'auto' or 'none'.": {
            "tool_choice": "required"
        },
        "Unknown parameter 'top_k', got 5, allowed: 'sparrow.top_k'.": {"top_k": 5},
        "Unknown parameter 'temprature', got 5, allowed: 'temperature'.": {"temprature": 5},
        "Missing required parameter 'model'.": {"model": None},
        f"'n' must be an integer, got \"{'a' * 79}....": {"n": "a" * 1000},
    }
    for text, changes in texts.items():
        assert str(refusal(ChatRequest, CHAT | changes)) == text


@pytest.mark.parametrize("cls", [ChatRequest, CompletionRequest])
def test_wrong_types_of_every_key(cls: type[GenerationRequest]) -> None:
    base: dict[str, Any] = CHAT if cls is ChatRequest else COMPLETION
    for value in (None, True, -1, 0, 1e300, 10**30, "", "a", [], [0], [None], [[]], {}, {"a": 1}):
        for name in cls.model_fields:
            _request_or_error(cls, base | {name: value})
        for name in SparrowOptions.model_fields:
            _request_or_error(cls, base | {"sparrow": {name: value}})
        for name in ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"):
            told = {"role": "assistant", "content": "a"} | {name: value}
            _request_or_error(ChatRequest, CHAT | {"messages": [told]})


def check_param(error: RequestError) -> None:
    assert error.param is None or f"'{error.param}'" in str(error)


def _request_or_error(cls: type[GenerationRequest], data: Any) -> None:
    try:
        request = parse_request(cls, data)
    except RequestError as error:
        check_param(error)
        return
    assert request.sampling(2**20)
    if isinstance(request, ChatRequest):
        json.dumps([request.template_messages(), request.template_tools()]).encode()


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value} if depth % 2 else [value]
    return value


def test_deep_nesting() -> None:
    assert chat(metadata={"a": nested(MOST_DEPTH - 2)})
    for depth in (MOST_DEPTH - 1, 10**5, 10**5 + 1):
        error = refusal(ChatRequest, CHAT | {"metadata": {"a": nested(depth)}})
        assert "nested" in str(error)
    assert refusal(ChatRequest, CHAT | {"messages": nested(10**5)}).param is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**6, b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_no_json(body: bytes) -> None:
    error = refusal(ChatRequest, body)
    assert (error.param, error.code) == (None, "invalid_json")
    assert len(str(error)) < 300


def test_a_body_of_bytes() -> None:
    assert parse_request(ChatRequest, json.dumps(CHAT).encode()) == chat()
    assert refusal(ChatRequest, b"[]").param is None
    assert refusal(ChatRequest, b'{"temperature": NaN}').code == "invalid_value"


def test_any_json_is_a_request_or_an_error() -> None:
    pytest.importorskip("hypothesis")
    from hypothesis import given
    from hypothesis import strategies as st

    keys = sorted(
        {
            part
            for table in PARAMETERS.values()
            for name in table
            for part in re.findall(r"\w+", name)
        }
    )
    words = [
        "user",
        "assistant",
        "tool",
        "text",
        "function",
        "auto",
        "none",
        "exact",
        "{}",
        "\ud800",
    ]
    texts = st.sampled_from(words) | st.text(st.characters(codec=None), max_size=5)
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
    names = st.sampled_from(keys) | texts
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    )
    bodies = st.dictionaries(names, values, max_size=4)
    one = st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), values)

    @given(values | bodies, bodies, st.lists(one | values, max_size=2), st.booleans())
    def check(anything: Any, body: dict[str, Any], messages: list[Any], told: bool) -> None:
        for cls, base in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
            _request_or_error(cls, anything)
            _request_or_error(cls, base | body)
        _request_or_error(ChatRequest, CHAT | {"messages": messages} | (body if told else {}))

    check()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Serve\n\n## Parameters\n"
    before, after = page[: written(page).start()], page[written(page).end() :]
    PAGE.write_text(before + section() + (f"\n{after}" if after else ""), encoding="utf-8")
