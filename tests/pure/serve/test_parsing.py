"""Chat answers as messages: thinking, content and tool calls, whole and in pieces."""

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, pairwise, product

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from sparrow.serve.parsing import (
    MessageDelta,
    MessageParser,
    ParsedMessage,
    ParsedToolCall,
    new_call_id,
    parse_message,
)

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ParsedToolCall("call_0", "get_weather", '{"city": "Paris"}')


def numbered() -> Callable[[], str]:
    numbers = count()
    return lambda: f"call_{next(numbers)}"


def parse(text: str, thinking=True, inside_thinking=False, tools=True) -> ParsedMessage:
    return parse_message(
        text, thinking=thinking, inside_thinking=inside_thinking, tools=tools, new_id=numbered()
    )


def stream(pieces, thinking=True, inside_thinking=False, tools=True) -> Iterator[MessageDelta]:
    parser = MessageParser(
        thinking=thinking, inside_thinking=inside_thinking, tools=tools, new_id=numbered()
    )
    yield from map(parser.feed, pieces)
    yield parser.finish()


def join(deltas) -> ParsedMessage:
    reasonings, contents, calls = zip(*deltas, strict=True)
    return ParsedMessage(
        "".join(reasonings) or None, "".join(contents) or None, tuple(chain.from_iterable(calls))
    )


# Thinking


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nOkay, 2 + 2.\n</think>\n\nIt is **4**.", "Okay, 2 + 2.", "It is **4**."),
        ("<think>\n\n</think>\n\nHello!", None, "Hello!"),  # as Qwen3 with /no_think
        ("<think>a</think>b", "a", "b"),
        (" \n<think>a</think>b", "a", "b"),
        ("<think>\n\n  a\n b \n\n</think> \n c\n", "  a\n b ", " \n c\n"),  # newlines only
        ("<think>\nHmm, wait", "Hmm, wait", None),  # cut off
        ("<think>\nHmm\n", "Hmm", None),
        ("<think>\nHmm\n</thin", "Hmm\n</thin", None),
        ("<think>", None, None),
        ("<think>a</think>", "a", None),
        ("<think>a</think>\n\n", "a", None),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("Use <think>a</think>", None, "Use <think>a</think>"),
        ("\n<thinking>a", None, "\n<thinking>a"),
        (" \n<thi", None, " \n<thi"),
        ("a</think>b", None, "a</think>b"),
        (" \n a \n", None, " \n a \n"),
        (" \n", None, " \n"),
        ("", None, None),
        (f"<think>\n{WEATHER}\n</think>\nDone.", WEATHER, "Done."),
    ],
)
def test_thinking_at_the_start(text: str, reasoning: str | None, content: str | None) -> None:
    assert parse(text) == (reasoning, content, ())
    assert join(stream(text)) == (reasoning, content, ())


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nOkay.\n</think>\n\nYes.", "Okay.", "Yes."),
        ("Okay", "Okay", None),
        ("\n", None, None),
        ("</think>Yes.", None, "Yes."),
    ],
)
def test_prompt_opens_the_thinking(text: str, reasoning: str | None, content: str | None) -> None:
    assert parse(text, inside_thinking=True) == (reasoning, content, ())
    assert join(stream(text, inside_thinking=True)) == (reasoning, content, ())


@pytest.mark.parametrize("inside_thinking", [False, True])
def test_thinking_is_content_if_not_asked_for(inside_thinking: bool) -> None:
    text = "\n<think>\na\n</think>\n\nb"
    message = parse(text, thinking=False, inside_thinking=inside_thinking)
    assert message == (None, text, ())


# Tool calls


def test_qwen3_thinks_and_calls() -> None:
    text = f"<think>\nI need the weather.\n</think>\n\n{WEATHER}"
    assert parse(text) == ("I need the weather.", None, (PARIS,))


def test_several_calls_with_text_around() -> None:
    other = WEATHER.replace("Paris", "Zürich")
    text = f"Let me look.\n\n{WEATHER}\n{other}\n\nOne moment. {WEATHER}\n"
    message = parse(text)
    assert message.content == "Let me look.\nOne moment."
    assert [json.loads(call.arguments)["city"] for call in message.tool_calls] == [
        "Paris",
        "Zürich",
        "Paris",
    ]
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1", "call_2"]


def test_calls_are_content_if_no_tools_are_offered() -> None:
    text = f"Look: {WEATHER}\n"
    assert parse(text, tools=False) == (None, text, ())


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"b": 1.50, "a": [1, {}]}}', "f", '{"b": 1.50, "a": [1, {}]}'),
        ('{"arguments":{"b":1},"name":"f"}', "f", '{"b":1}'),  # keys in another order
        ('{"name": "f", "arguments": {}}', "f", "{}"),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"name": "f", "arguments": "{a}"}', "f", '"{a}"'),
        ('{"name": "f", "arguments": {"a": "{\\"b\\": 1}"}}', "f", '{"a": "{\\"b\\": 1}"}'),
        ('{"name": "f", "arguments": {"a": "é\\u00e9\\ud83d"}}', "f", '{"a": "é\\u00e9\\ud83d"}'),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", '{"a": 1e999}'),
        ('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}", "f", f'{{"a": {"1" * 5000}}}'),
        ('{"name": "f", "arguments": {"a": "<tool_call>"}}', "f", '{"a": "<tool_call>"}'),
        ('\t{\n "name" : "f" ,\n "arguments" : null\n}\n', "f", "null"),
    ],
)
def test_arguments_are_the_sampled_json(call: str, name: str, arguments: str) -> None:
    message = parse(f"<tool_call>{call}</tool_call>")
    assert message == (None, None, (ParsedToolCall("call_0", name, arguments),))
    json.loads(arguments, parse_int=float)


@pytest.mark.parametrize(
    "call",
    [
        "",
        "f(x)",
        '{"name": "f", "arguments": {"city": "Paris"}',
        '{"name": "f", "arguments": {"city": "Par\nis"}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f"} {"name": "g"}',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "\\ud800"}',  # could not be sent as UTF-8
        '[{"name": "f"}]',
        '"name"',
        '{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "<function=f>",
        "<function=>\n</function>",
        "<function=f</function>",
        "<function=f>a</function>",
        "<function=f><parameter=a>1</function>",
        "<function=f>a <parameter=a>1</parameter></function>",
        "<function=f><parameter=>1</parameter></function>",
        "<function=f></function> and",
    ],
)
def test_malformed_calls_are_content(call: str) -> None:
    text = f" So: \n<tool_call>{call}</tool_call>\n"
    assert parse(text) == (None, text, ())
    assert join(stream(text)) == (None, text, ())


def test_a_call_that_is_cut_off_is_content() -> None:
    text = f"Look.\n{WEATHER}\n<tool_call>\n" + '{"name": "f", "argum'
    message = parse(text)
    assert message.tool_calls == (PARIS,)
    assert message.content == 'Look.\n<tool_call>\n{"name": "f", "argum'


def test_a_call_after_one_that_was_left_open() -> None:
    text = 'The tag <tool_call> {"name": \n'
    assert parse(f"{text}{WEATHER}") == (None, text.strip(), (PARIS,))


def test_qwen3_coder_calls() -> None:
    text = """I will run it.

<tool_call>
<function=run>
<parameter=code>
def f(a):
    return "<b>"

</parameter>
<parameter=limits>
{"seconds": 5}
</parameter>
<parameter=count>
3
</parameter>
<parameter=note>
</parameter>
</function>
</tool_call>"""
    message = parse(text)
    assert message.content == "I will run it."
    (call,) = message.tool_calls
    assert call.name == "run"
    code = 'def f(a):\n    return "<b>"\n'
    arguments = {"code": code, "limits": {"seconds": 5}, "count": 3, "note": ""}
    assert json.loads(call.arguments) == arguments
    assert list(json.loads(call.arguments)) == list(arguments)
    (call,) = parse("<tool_call><function=now></function></tool_call>").tool_calls
    assert call[1:] == ("now", "{}")


def test_ids_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)


# Streaming


def test_text_is_passed_on_at_once() -> None:
    pieces = ["<think>", "\n", "Hm", "m <", "br> \n", "</think>", "\n\n", "Yes", ", it", " is."]
    deltas = list(stream(pieces))
    assert [delta.reasoning for delta in deltas[:6]] == ["", "", "Hm", "m ", "<br> ", ""]
    assert [delta.content for delta in deltas[6:]] == ["", "Yes", ", it", " is.", ""]


def test_a_call_is_whole_when_it_is_closed() -> None:
    head, end = WEATHER[:-1], WEATHER[-1]
    deltas = list(stream(["Look.", " \n", head, end, "\n", "Done", "."]))
    assert [delta.content for delta in deltas] == ["Look.", "", "", "", "", "\nDone", ".", ""]
    assert [delta.tool_calls for delta in deltas] == [(), (), (), (PARIS,), (), (), (), ()]


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        ("", "The quick brown fox. "),
        ("", "<"),
        ("", " \n"),
        ("", WEATHER),
        ("", "<tool_call>"),
        ("", "<tool_call></tool_call>"),
        ("<think>", "\n"),
        ("<think>", "</thin"),
        ('<tool_call>{"name": "f"', ', "a": 1'),
        ("<tool_call><function=f>", "<parameter=a>"),
    ],
)
def test_time_is_linear(start: str, repeated: str) -> None:
    """Quadratic time would be far above the limits, which suit busy machines."""
    text = start + repeated * (300_000 // len(repeated)) + "</tool_call>"
    before = time.process_time()
    whole = parse(text)
    assert time.process_time() - before < 1
    assert join(stream(text)) == whole
    assert time.process_time() - before < 5


# Properties: any text in any pieces

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SPACES = [" ", "\n", "\n\n", " \n ", "\xa0"]
PIECES = [
    "a",
    "é b",
    "<",
    "</",
    "<tool",
    "ink>",
    '{"name": "f"}',
    '{"name": "f", "a',
    "{",
    '"',
    "}",
]
CODER = "<tool_call><function=f><parameter=k>v</parameter></function></tool_call>"
DANGLING = f"<tool_call>{{ {WEATHER}"
fragments = st.one_of(
    st.sampled_from([WEATHER, CODER, DANGLING, "<think>\nb\n</think>\n"]),
    st.sampled_from(TAGS),
    st.sampled_from(SPACES),
    st.sampled_from(PIECES),
    st.text(max_size=5),
)
starts = st.sampled_from(["", "", " \n", "<think>", "\n<think>\na</think>\n\n"])
texts = st.builds("{}{}".format, starts, st.lists(fragments, max_size=8).map("".join))
flags = st.fixed_dictionaries(
    {
        "thinking": st.sampled_from([True, True, False]),
        "inside_thinking": st.sampled_from([False, False, True]),
        "tools": st.sampled_from([True, True, False]),
    }
)


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=40)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


@given(split_texts(), flags)
def test_stream_is_whole(pieces: list[str], flags: dict[str, bool]) -> None:
    text = "".join(pieces)
    assert join(stream(pieces, **flags)) == parse(text, **flags) == join(stream(text, **flags))


@given(texts, flags)
def test_message_follows_the_rules(text: str, flags: dict[str, bool]) -> None:
    message = parse(text, **flags)
    calls = [call[1:] for call in message.tool_calls]
    assert (message.reasoning, message.content, calls) == expected(text, **flags)


def expected(text: str, thinking: bool, inside_thinking: bool, tools: bool):
    """The rules of sparrow.serve.parsing, applied to a whole text with regular expressions."""
    reasoning, opening = "", "" if inside_thinking else r"\s*<think>"
    if thinking and (block := re.match(rf"{opening}(.*?)(</think>|\Z)", text, re.DOTALL)):
        reasoning, text = block[1].strip("\n"), text[block.end() :].lstrip("\n")
    pieces, calls, position = [""], [], 0
    for found in re.finditer("<tool_call>.*?</tool_call>", text if tools else "", re.DOTALL):
        pieces[-1] += text[position : found.start()]
        position = found.end()
        block = found[0]
        starts = [start for start in (0, block.rindex("<tool_call>")) if only_call(block[start:])]
        pieces[-1] += block[: starts[0]] if starts else block
        if starts:
            calls.append(only_call(block[starts[0] :]))
            pieces.append("")
    pieces[-1] += text[position:]
    if calls:
        first, *middle, last = pieces
        pieces = [first.rstrip(), *(piece.strip() for piece in middle), last.lstrip()]
    return reasoning or None, "\n".join(filter(None, pieces)) or None, calls


def only_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of the call that the text is, if it is one."""
    message = parse(text, thinking=False)
    return message.tool_calls[0][1:] if message.content is None else None


@given(texts, flags)
def test_no_character_is_lost(text: str, flags: dict[str, bool]) -> None:
    reasoning, content, _ = parse(text, **{**flags, "tools": False})
    reasoning, content = (squeeze(part or "") for part in (reasoning, content))
    tags = product(("", "<think>"), ("", "</think>"))
    assert squeeze(text) in [f"{start}{reasoning}{end}{content}" for start, end in tags]


def squeeze(text: str) -> str:
    return "".join(text.split())


@given(texts, flags)
def test_little_is_held_back(text: str, flags: dict[str, bool]) -> None:
    """At most a tag but its last character, whitespace aside, unless a tool call is open."""
    *_, last = stream([text], **flags)
    held = last.reasoning + last.content
    assert not last.tool_calls
    assert len(squeeze(held)) < len("</tool_call>") or (
        flags["tools"] and held.lstrip().startswith("<tool_call>")
    )


strings = st.text(max_size=10).filter(lambda text: "<" not in text)  # no closing tag
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | strings,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(strings, values, max_size=3),
    max_leaves=8,
)
calls = st.tuples(strings.filter(bool), st.dictionaries(strings, json_values, max_size=4))
words = st.text(alphabet="ab, \n", max_size=20).map(str.strip)


@given(words, words, st.lists(calls, max_size=3))
def test_what_the_template_writes_is_read(thought: str, text: str, calls: list) -> None:
    rendered = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    answer = "\n".join([*filter(None, [text]), *rendered])
    message = parse(f"<think>\n{thought}\n</think>\n\n{answer}")
    assert message[:2] == (thought or None, text or None)
    assert [call.name for call in message.tool_calls] == [name for name, _ in calls]
    for call, (_, arguments) in zip(message.tool_calls, calls, strict=True):
        assert call.arguments == json.dumps(arguments)
