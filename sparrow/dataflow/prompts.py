"""Prompts in tokens, from wherever a user has them: a task, a file of rows, texts, token ids.

A source says what it is and has a digest of its content, so that measurements on other prompts are
never mixed. Rows of prompts are answered; texts and ids are read as they stand (forced mode).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibrate.collecting import Mode
from sparrow.calibrate.flows.score import samples
from sparrow.calibrate.flows.texts import Text
from sparrow.calibrate.rollouts import Prompt
from sparrow.dataflow.evaluate import PUZZLE_LANGUAGE, Language
from sparrow.models import Decoder, load_tokenizer
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Source as Tasks
from sparrow.tasks.gym import Gym
from sparrow.tasks.words import WORDS

GYM = "gym/"
FEW = 5  # texts that are named one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Numbered prompts, what they are, and a digest of where they come from."""

    name: str
    digest: str
    mode: Mode
    prompts: tuple[Prompt, ...]


def of_task(model: Decoder, task: str, *, length: int, count: int, skip: int = 0) -> Source:
    """Rows of a puzzle family, or gym/NAME of reasoning-gym, from number `skip` on."""
    made = _task(task)
    rows = [made.row(number, length) for number in range(skip, skip + count)]
    encode = language_of(model, task in PUZZLES).encode
    prompts = _numbered(((row.id, encode(row.prompt)) for row in rows), skip)
    name = f"{task}, length {length}, rows from {skip}"
    first = made.row(0, length).prompt
    return Source(
        name=name, digest=_digest(f"{task} {length} {first}"), mode="generated", prompts=prompts
    )


def _task(name: str) -> Tasks:
    if name.startswith(GYM):
        return Gym(dataset=name.removeprefix(GYM))
    if name not in PUZZLES:
        raise ValueError(f"no task {name!r}; there are {', '.join(PUZZLES)} and {GYM}NAME")
    return PUZZLES[name]


def language_of(model: Decoder, puzzles: bool = False) -> Language:
    """How a model reads and writes; models of the package read puzzles word for word."""
    if puzzles and model.spec.vocabulary == len(WORDS):
        return PUZZLE_LANGUAGE
    if model.source is None:
        raise ValueError("a model without a source has no tokenizer: give prompts as token ids")
    return Language.of(load_tokenizer(model.source), str(model.source))


def of_rows(model: Decoder, file: str | Path, *, count: int | None = None, skip: int = 0) -> Source:
    """JSON lines or parquet with a "prompt": a text, or chat messages as verl has them."""
    place = Path(file)
    rows = _read_rows(place)[skip : None if count is None else skip + count]
    if not rows:
        raise ValueError(f"{place}: no row from number {skip} on")
    tokenizer = _tokenizer(model)
    encode = Language.of(tokenizer, str(model.source)).encode
    found = []
    for number, row in enumerate(rows, skip):
        found.append((f"row {number}", _encoded(row, place, number, tokenizer, encode)))
    return Source(
        name=f"{place.name}, rows from {skip}",
        digest=_digest(place.read_bytes()),
        mode="generated",
        prompts=_numbered(found, skip),
    )


def _encoded(
    row: Any, place: Path, number: int, tokenizer: Any, encode: Callable[[str], list[int]]
) -> list[int]:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if isinstance(prompt, str) and prompt:
        return encode(prompt)
    messages = list(prompt) if isinstance(prompt, Sequence | np.ndarray) else []
    if not messages or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise ValueError(
            f'{place}, row {number}: "prompt" must be a text or chat messages with role and '
            f"content, got {prompt!r:.80}"
        )
    if tokenizer.chat_template is None:
        raise ValueError(f"{place}: chat messages, but the model has no chat template")
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _read_rows(place: Path) -> list[Any]:
    if place.suffix == ".parquet":
        import pyarrow.parquet  # an extra: rows in JSON lines need nothing

        return pyarrow.parquet.read_table(place).to_pylist()
    rows = []
    for number, line in enumerate(_text(place).splitlines(), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{place}, line {number} is no JSON: {error}") from error
    return rows


def of_texts(model: Decoder, texts: Sequence[Text], *, tokens: int, start: int = 1) -> Source:
    """The first tokens of long texts, read as they stand."""
    made = samples(_tokenizer(model), texts, tokens)
    prompts = _numbered((one.name, one.ids) for one in made)
    named = f": {', '.join(one.name for one in made)}" if len(made) < FEW else ""
    name = f"{len(made)} texts of {tokens} tokens from {start} on{named}"
    return _given(name, prompts, start)


def _text(place: Path) -> str:
    try:
        return place.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is no text: {error}") from error


def of_ids(model: Decoder, file: str | Path, *, count: int | None = None, skip: int = 0) -> Source:
    """JSON lines with "ids", and "start" where the first tokens are a prompt."""
    place = Path(file)
    rows = _read_rows(place)[skip : None if count is None else skip + count]
    found = []
    for number, row in enumerate(rows, skip):
        ids = row.get("ids") if isinstance(row, dict) else None
        start = row.get("start", 1) if isinstance(row, dict) else None
        if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, start]):
            raise ValueError(
                f'{place}, line {number + 1}: give "ids", a list of token ids, and "start"'
            )
        _check_ids(model, place, number, ids)
        found.append(Prompt(number=number, name=f"line {number + 1}", ids=tuple(ids), start=start))
    if not found:
        raise ValueError(f"{place}: no sequence in it")
    return _given(place.name, found, None)


def _check_ids(model: Decoder, place: Path, number: int, ids: Sequence[int]) -> None:
    spec, where = model.spec, f"{place}, line {number + 1}"
    if not 3 <= len(ids) <= spec.max_positions:
        raise ValueError(f"{where}: {len(ids)} tokens, allowed: 3 to {spec.max_positions}")
    wrong = [token for token in ids if not 0 <= token < spec.vocabulary]
    if wrong:
        raise ValueError(f"{where}: token id {wrong[0]}, allowed: 0 to {spec.vocabulary - 1}")


def _given(name: str, prompts: Sequence[Prompt], start: int | None) -> Source:
    placed = tuple(
        one if start is None else Prompt(number=one.number, name=one.name, ids=one.ids, start=start)
        for one in prompts
    )
    content = json.dumps([(one.ids, one.start) for one in placed])
    return Source(name=name, digest=_digest(content), mode="forced", prompts=placed)


def _tokenizer(model: Decoder) -> Any:
    if model.source is None:
        raise ValueError("a model without a source has no tokenizer: give prompts as token ids")
    return load_tokenizer(model.source)


def _numbered(found: Iterable[tuple[str, Sequence[int]]], skip: int = 0) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(number=number, name=name, ids=tuple(ids))
        for number, (name, ids) in enumerate(found, skip)
    )


def _digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]
