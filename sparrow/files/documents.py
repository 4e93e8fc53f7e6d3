"""JSON documents, JSON lines and configurations that carry a digest of what they say."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparrow.files.disk import MOST_BYTES, check_regular, write_whole

DIGEST = "digest"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # and lone surrogates
_OF_BELOW = " of the lines below"
_SEAL = re.compile(r', "digest": "([0-9a-f]{16})"\}')

Json = dict[str, Any]


def content_digest(document: Mapping[str, Any]) -> str:
    """The sha256 of what a JSON document says, its digest left out."""
    content = {key: value for key, value in document.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# JSON documents.


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest: a key a line, lists of objects an object a line."""
    write_whole(Path(path), [document_text(document)])


def document_text(document: Mapping[str, Any]) -> str:
    """What `write_document` writes; control characters in texts are escaped."""
    plain = _printable(json.loads(json.dumps(dict(document))))  # as it will be read
    rows = [
        f"  {json.dumps(key)}: {_value_text(value)}"
        for key, value in {**plain, DIGEST: content_digest(plain)}.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def printable(text: str) -> str:
    """A text with its control characters shown as escapes: nothing in it that a terminal obeys."""
    return HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


def _printable(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


def _value_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
    return json.dumps(value)


def read_document(path: str | Path, what: str = "file") -> Json:
    """The JSON object in a file, without its digest; ValueError with the file and what is wrong."""
    text = read_text(path, what)
    try:
        return parse_document(text)
    except ValueError as error:
        raise ValueError(f"{what} {path}: {error}") from error


def read_text(path: str | Path, what: str = "file", most: int = MOST_BYTES) -> str:
    """The text of a file; ValueError where it cannot be read, is too large or is none."""
    try:
        check_regular(path, what, most)
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is not UTF-8 text: {error}") from error


def parse_document(text: str) -> Json:
    """The JSON object of a text, its digest checked and left out."""
    document = parse_json(text)
    if not isinstance(document, dict):
        raise ValueError(f"got {type(document).__name__}, allowed: a JSON object")
    try:
        for place, string in _strings(document):
            if CONTROL.search(string):
                raise ValueError(f"control characters in {place or 'a key'}: {string[:80]!r}")
        digest = content_digest(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if document.pop(DIGEST, digest) != digest:
        raise ValueError(
            "its content does not match its digest: the file is damaged, or was edited; where the "
            'edit is meant, remove the key "digest"'
        )
    return document


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError where it is none, too deep or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object whose keys differ: of two values for one key, neither can be the one meant."""
    unique: Json = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"got the key {key!r} twice, allowed: each key once")
        unique[key] = value
    return unique


def _strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with where it stands; keys are without a place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield "", key
            yield from _strings(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{place}[{number}]")


# JSON lines.


def sealed(line: str) -> str:
    """A JSON object on one line, with a digest of its text as its last key."""
    return f'{line[:-1]}, "digest": "{_line_digest(line)}"}}'


def unsealed(line: str) -> str:
    """The line as it was before `sealed`; ValueError where it was changed since."""
    seal = _SEAL.search(line, max(0, len(line) - 64))
    if seal is None or seal.end() != len(line):
        return line
    plain = line[: seal.start()] + "}"
    if _line_digest(plain) != seal[1]:
        raise ValueError("the line does not match its digest: it is damaged, or was edited")
    return plain


def parse_line(line: str) -> Json:
    """The JSON object on a line, its digest checked and left out."""
    data = parse_json(unsealed(line.rstrip("\n")))
    if not isinstance(data, dict):
        raise ValueError(f"got {type(data).__name__}, allowed: a JSON object")
    if DIGEST in data:
        raise ValueError(f"got the digest {data[DIGEST]!r}, which is none: the line is damaged")
    return data


def read_lines(path: str | Path, *, growing: bool = False) -> list[Json]:
    """The objects in a file of JSON lines; ValueError with the file and the line that is wrong.

    growing: a last line without its end is one that is being written, and left out.
    """
    *lines, last = read_text(path).split("\n")
    objects = []
    for number, line in enumerate([*lines, last] if last and not growing else lines, 1):
        try:
            objects.append(parse_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return objects


def _line_digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


# Text with a digest in its first line, a comment.


def add_digest_line(text: str) -> str:
    """A text whose comments begin with #, below a line with its digest."""
    return f"# sha256:{_text_digest(text)}{_OF_BELOW}\n{text}"


def check_digest_line(text: str) -> None:
    """ValueError where a text differs from what its first line says; without such a line none."""
    first, _, below = text.partition("\n")
    if not first.startswith("#") or ("sha256:" not in first and _OF_BELOW not in first):
        return
    if first != f"# sha256:{_text_digest(below)}{_OF_BELOW}":
        raise ValueError(
            "its lines do not match the sha256 in the first one: the file is damaged, or was "
            "edited; where the edit is meant, remove the first line"
        )


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
