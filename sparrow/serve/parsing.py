"""Chat answers as messages: the sampled text to thinking, content and tool calls, also streamed.

An answer is an optional block of thinking at its start, then content and tool calls in any order:

    <think> ... </think> ... <tool_call> {"name": ..., "arguments": {...}} </tool_call> ...

What is stripped, whole or streamed, and nothing else (the newlines are those that the chat template
of Qwen3 puts there and strips from messages):

- newlines at both ends of the thinking, also if it is cut off; newlines after </think>; whitespace
  before <think>
- whitespace on both sides of a tool call; one newline joins the content before and after calls

A block ends at the first closing tag. A tool call that is not closed, or in neither of the two
forms that `_parse_call` reads, is content as it stands; so are <think> after other content and a
lone </think>. Tool calls inside the thinking are thinking.
"""

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?", re.DOTALL)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ParsedToolCall(NamedTuple):
    """A whole tool call; arguments: JSON text."""

    id: str
    name: str
    arguments: str


class MessageDelta(NamedTuple):
    """What a piece of text adds to a message; tool calls are whole."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()


class ParsedMessage(NamedTuple):
    """A whole message; None where there is no text."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ParsedToolCall, ...]


NOTHING = MessageDelta()


class _Block(NamedTuple):
    """A part of an answer: the tag that ends it ("": none), its text so far, what is stripped."""

    tag: str
    pieces: list[str]
    strip: str | None  # as of str.rstrip


class MessageParser:
    """A parser of one answer that arrives in pieces.

    thinking: <think> is a tag; otherwise it is content. inside_thinking: the prompt already opened
    the block. tools: the request offers tools; otherwise tool calls are content.

    Held back until it is decided: what may be the beginning of a tag, an open tool call, and
    whitespace that would be stripped if a tag followed. Takes time linear in the text.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        inside_thinking: bool = False,
        tools: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._new_id = new_id
        self._reasoning: list[str] = []  # of the next delta, as are the next two
        self._content: list[str] = []
        self._calls: list[ParsedToolCall] = []
        self._thinking = _Block(END_THINK, self._reasoning, "\n")
        self._answer = _Block(CALL if tools else "", self._content, None if tools else "")
        self._call = _Block(END_CALL, [], "")
        self._block = self._thinking if thinking and inside_thinking else self._answer
        self._at_start = thinking and not inside_thinking  # only whitespace so far
        self._tail = ""  # may be the beginning of a tag
        self._lead: str | None = "\n" if self._block is self._thinking else ""
        self._held: list[str] = []  # whitespace that a tag would strip
        self._has_content = False

    def feed(self, text: str) -> MessageDelta:
        """Return what is certain after the next piece of the answer."""
        if self._tail or self._at_start or "<" in text:
            self._read(self._tail + text)
        else:
            self._write(text)
        return self._take_delta()

    def finish(self) -> MessageDelta:
        """Return what was held back, at the end of the answer."""
        self._write(self._tail)
        if self._block is self._call:
            self._block = self._answer
            self._write("".join([CALL, *self._call.pieces]))
        if self._block is self._answer and self._lead is not None:
            self._content += self._held
        return self._take_delta()

    def _read(self, text: str) -> None:
        """Find the tags in the text and write what is between them."""
        position = self._find_start(text) if self._at_start else 0
        while (tag := self._block.tag) and (found := text.find(tag, position)) >= 0:
            self._write(text[position:found])
            self._pass_tag()
            position = found + len(tag)
        tag = THINK if self._at_start else tag
        start = text.rfind("<", max(position, len(text) - len(tag) + 1))
        end = start if start >= 0 and tag.startswith(text[start:]) else len(text)
        self._write(text[position:end])
        self._tail = text[end:]

    def _find_start(self, text: str) -> int:
        """Return where the text goes on after whitespace and <think>."""
        start = len(text) - len(text.lstrip())
        self._held.append(text[:start])
        self._at_start = THINK.startswith(text[start:])
        if not text.startswith(THINK, start):
            return start
        self._at_start, self._block, self._lead, self._held = False, self._thinking, "\n", []
        return start + len(THINK)

    def _pass_tag(self) -> None:
        """Go on to the block that follows the tag."""
        block, self._block = self._block, self._answer
        if block is self._answer:
            self._block = self._call
        elif block is self._call:
            self._close_call()
        else:
            self._lead, self._held = "\n", []

    def _write(self, text: str) -> None:
        """Add text to the current block; whitespace at its end waits for what follows."""
        block = self._block
        if block is self._call:
            block.pieces.append(text)
            return
        text = text.lstrip(self._lead)
        if not text:
            return
        self._lead = ""
        certain = text.rstrip(block.strip)
        if certain:
            block.pieces.extend(self._held)
            block.pieces.append(certain)
            self._held.clear()
            self._has_content = block is self._answer
        if len(certain) < len(text):
            self._held.append(text[len(certain) :])

    def _close_call(self) -> None:
        """Add a tool call; content if it is malformed.

        If an earlier opening tag was left open, the call begins at the last one.
        """
        body = "".join(self._call.pieces)
        self._call.pieces.clear()
        before, _, last = f"{CALL}{body}".rpartition(CALL)
        for skipped, inner in ("", body), (before, last):
            if function := _parse_call(inner):
                self._write(skipped)
                self._calls.append(ParsedToolCall(self._new_id(), *function))
                self._lead, self._held = None, ["\n"] if self._has_content else []
                return
        self._write(f"{CALL}{body}{END_CALL}")

    def _take_delta(self) -> MessageDelta:
        if not (self._reasoning or self._content or self._calls):
            return NOTHING
        delta = MessageDelta("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        for pieces in self._reasoning, self._content, self._calls:
            pieces.clear()
        return delta


def parse_message(
    text: str,
    *,
    thinking: bool,
    inside_thinking: bool = False,
    tools: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> ParsedMessage:
    """Parse a whole answer; see MessageParser."""
    parser = MessageParser(
        thinking=thinking, inside_thinking=inside_thinking, tools=tools, new_id=new_id
    )
    first, last = parser.feed(text), parser.finish()
    return ParsedMessage(
        first.reasoning + last.reasoning or None,
        first.content + last.content or None,
        first.tool_calls + last.tool_calls,
    )


def _parse_call(body: str) -> tuple[str, str] | None:
    """Parse a tool call: its name and arguments as JSON text; None if it is malformed.

    Forms: the JSON object of Hermes and Qwen3, or the tags of Qwen3-Coder.
    """
    try:
        parse = _parse_json if body.lstrip().startswith("{") else _parse_tags
        name, arguments = parse(body)
        f"{name}{arguments}".encode()  # escapes may stand for what is not a character
    except (ValueError, RecursionError):
        return None
    return name, arguments


def _parse_json(body: str) -> tuple[str, str]:
    """Parse {"name": ..., "arguments": {...}}: arguments as they stand in the text.

    Arguments that are a JSON object in a string are the string's value; missing ones are {}.
    """
    members = _members(body)
    name, _ = members.get("name", (None, ""))
    value, arguments = members.get("arguments", ({}, "{}"))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    if isinstance(value, str) and value.lstrip().startswith("{") and _is_json(value):
        arguments = value
    return name, arguments


def _parse_tags(body: str) -> tuple[str, str]:
    """Parse <function=name><parameter=key>value</parameter></function>.

    A value that is not JSON is a string; one newline at either end of it is stripped.
    """
    function = _FUNCTION.fullmatch(body)
    *parameters, rest = function[2].split("</parameter>") if function else [body]
    arguments = {}
    for parameter in parameters:
        if not (match := _PARAMETER.fullmatch(parameter)):
            raise ValueError("malformed parameter")
        key, text = match.groups()
        arguments[key] = text if _is_json(text) else _dump(text)
    if not function or rest.strip():
        raise ValueError("neither form of a tool call")
    members = ", ".join(f"{_dump(key)}: {text}" for key, text in arguments.items())
    return function[1], f"{{{members}}}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Values are only looked at, never written again: no limit on digits.
_DECODER = json.JSONDecoder(parse_int=float, parse_constant=_refuse)


def _dump(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return each value of a JSON object and the text it stands for; ValueError if it is none."""
    if not isinstance(_DECODER.decode(text), dict):
        raise ValueError("not a JSON object")
    members = {}
    position = _skip(text, text.index("{") + 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        start = _skip(text, position)
        value, position = _DECODER.raw_decode(text, start)
        members[key] = value, text[start:position]
        position = _skip(text, position)
    return members


def _skip(text: str, position: int) -> int:
    """Return where the next value begins in an object that is known to be JSON."""
    while text[position] in " \t\r\n,:":
        position += 1
    return position
