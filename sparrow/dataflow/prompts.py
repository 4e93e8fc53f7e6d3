"""Prompts in tokens, from wherever a user has them: a task, a file of rows, texts, token ids.

A source says what it is and has a digest of its content, so that measurements on other prompts are
never mixed. Rows of prompts are answered; texts and ids are read as they stand (forced mode).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparrow.calibration.calibration import Mode
from sparrow.calibration.flows.score import samples
from sparrow.calibration.flows.texts import Text
from sparrow.calibration.replay import Prompt
from sparrow.dataflow.language import language_of, tokenizer_of
from sparrow.models import Decoder
from sparrow.schema.common import ChatConfig, ColumnsConfig
from sparrow.tasks import PUZZLES
from sparrow.tasks.choosing import source_of
from sparrow.tasks.rows import files_digest, locate_files, read_files, read_prompt, read_rows

FEW = 5  # texts that are named one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Numbered prompts, what they are, and a digest of where they come from."""

    name: str
    digest: str
    mode: Mode
    prompts: tuple[Prompt, ...]


def of_task(
    model: Decoder,
    task: str,
    *,
    length: int,
    count: int,
    skip: int = 0,
    chat: ChatConfig | None = None,
) -> Source:
    """Prompts of a puzzle family, or of gym/NAME of reasoning-gym, from number `skip` on."""
    source, encode = source_of(task), language_of(model, task in PUZZLES, chat=chat).encode
    rows = [(number, source.row(number, length)) for number in range(skip, skip + count)]
    return Source(
        name=f"{task}, length {length}, rows from {skip}",
        digest=_digest(f"{task} {length} {source.row(0, length).prompt}{_settings(chat)}"),
        mode="generated",
        prompts=tuple(
            Prompt(number=number, name=row.id, ids=tuple(encode(row.prompt)))
            for number, row in rows
        ),
    )


def of_rows(
    model: Decoder,
    file: str | Path,
    *,
    count: int | None = None,
    skip: int = 0,
    columns: ColumnsConfig | None = None,
    chat: ChatConfig | None = None,
) -> Source:
    """Prompts of rows: texts or chat messages of a file or of a dataset of the hub."""
    columns = columns or ColumnsConfig()
    files = locate_files(file)
    rows = read_files(files)[skip : None if count is None else skip + count]
    if not rows:
        raise ValueError(f"{file}: no row from number {skip} on")
    language, prompts = language_of(model, chat=chat), []
    for number, row in enumerate(rows, skip):
        try:
            ids = language.encode(read_prompt(row, columns))
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from error
        prompts.append(Prompt(number=number, name=f"row {number}", ids=tuple(ids)))
    name = files[0].name if len(files) == 1 else str(file)
    changed = _settings(columns, chat)
    return Source(
        name=f"{name}, rows from {skip}",
        digest=_digest(files_digest(files) + changed) if changed else files_digest(files),
        mode="generated",
        prompts=tuple(prompts),
    )


def of_texts(model: Decoder, texts: Sequence[Text], *, tokens: int, start: int = 1) -> Source:
    """The first tokens of long texts, read as they stand."""
    made = samples(tokenizer_of(model), texts, tokens)
    named = f": {', '.join(one.name for one in made)}" if len(made) < FEW else ""
    prompts = [
        Prompt(number=number, name=one.name, ids=tuple(one.ids), start=start)
        for number, one in enumerate(made)
    ]
    return _read(f"{len(made)} texts of {tokens} tokens from {start} on{named}", prompts)


def of_ids(model: Decoder, file: str | Path, *, count: int | None = None, skip: int = 0) -> Source:
    """JSON lines with "ids", and "start" where the first tokens are a prompt."""
    place = Path(file)
    rows = read_rows(place)[skip : None if count is None else skip + count]
    prompts = []
    for number, row in enumerate(rows, skip):
        name, row = f"line {number + 1}", row if isinstance(row, dict) else {}
        ids, start = row.get("ids"), row.get("start", 1)
        if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, start]):
            raise ValueError(f'{place}, {name}: give "ids", a list of token ids, and "start"')
        _check_ids(model, f"{place}, {name}", ids, start)
        prompts.append(Prompt(number=number, name=name, ids=tuple(ids), start=start))
    if not prompts:
        raise ValueError(f"{place}: no sequence in it")
    return _read(place.name, prompts)


def _check_ids(model: Decoder, where: str, ids: Sequence[int], start: int) -> None:
    spec = model.spec
    if not 3 <= len(ids) <= spec.max_positions:
        raise ValueError(f"{where}: {len(ids)} tokens, allowed: 3 to {spec.max_positions}")
    wrong = [token for token in ids if not 0 <= token < spec.vocabulary]
    if wrong:
        raise ValueError(f"{where}: token id {wrong[0]}, allowed: 0 to {spec.vocabulary - 1}")
    if not 1 <= start <= len(ids) - 2:
        raise ValueError(f"{where}: start {start}, allowed: 1 to {len(ids) - 2}")


def _read(name: str, prompts: Sequence[Prompt]) -> Source:
    content = json.dumps([(one.ids, one.start) for one in prompts])
    return Source(name=name, digest=_digest(content), mode="forced", prompts=tuple(prompts))


def _settings(*sections: ChatConfig | ColumnsConfig | None) -> str:
    """What settings add to a digest: nothing where they are the defaults."""
    return "".join(s.model_dump_json() for s in sections if s is not None and s != type(s)())


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
