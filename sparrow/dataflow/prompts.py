"""Prompts in tokens for calibration: of a task, of rows, of texts, or token ids.

A set of prompts has a name and a digest of its content, so that measurements on other prompts are
never mixed. Prompts of tasks and rows are answered; texts and ids are teacher-forced.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparrow.calibration.calibration import Mode
from sparrow.calibration.flows.score import samples
from sparrow.calibration.flows.texts import Text
from sparrow.calibration.replay import Prompt
from sparrow.dataflow.language import load_language
from sparrow.dataflow.run_files import read_rollouts, rollout_steps
from sparrow.models import Decoder
from sparrow.schema.common import ChatConfig, ColumnsConfig
from sparrow.tasks import PUZZLES
from sparrow.tasks.choosing import find_task
from sparrow.tasks.rows import files_digest, locate_files, read_files, read_prompt, read_rows

FEW = 5  # below, texts are listed by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Numbered prompts, with a description and a digest of their content."""

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
) -> PromptSet:
    """Prompts of a puzzle family, or of gym/NAME of reasoning-gym, from number `skip` on."""
    source, encode = find_task(task), load_language(model, task in PUZZLES, chat=chat).encode
    rows = [(number, source.row(number, length)) for number in range(skip, skip + count)]
    return PromptSet(
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
) -> PromptSet:
    """Prompts of rows: texts or chat messages of a file or of a dataset of the hub."""
    columns = columns or ColumnsConfig()
    files = locate_files(file)
    rows = read_files(files)[skip : None if count is None else skip + count]
    if not rows:
        raise ValueError(f"{file}: no rows from number {skip} on")
    language, prompts = load_language(model, chat=chat), []
    for number, row in enumerate(rows, skip):
        try:
            ids = language.encode(read_prompt(row, columns))
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from error
        prompts.append(Prompt(number=number, name=f"row {number}", ids=tuple(ids)))
    name = files[0].name if len(files) == 1 else str(file)
    changed = _settings(columns, chat)
    return PromptSet(
        name=f"{name}, rows from {skip}",
        digest=_digest(files_digest(files) + changed) if changed else files_digest(files),
        mode="generated",
        prompts=tuple(prompts),
    )


def of_texts(model: Decoder, texts: Sequence[Text], *, tokens: int, start: int = 1) -> PromptSet:
    """Prompts of the first tokens of long texts, which are teacher-forced."""
    encoded = samples(load_language(model).tokenizer, texts, tokens)
    names = f": {', '.join(text.name for text in encoded)}" if len(encoded) < FEW else ""
    prompts = [
        Prompt(number=number, name=text.name, ids=tuple(text.ids), start=start)
        for number, text in enumerate(encoded)
    ]
    return _forced(f"{len(encoded)} texts of {tokens} tokens from {start} on{names}", prompts)


def of_ids(
    model: Decoder, file: str | Path, *, count: int | None = None, skip: int = 0
) -> PromptSet:
    """Prompts of JSON lines with "ids", and "start" if the first tokens are a prompt."""
    place = Path(file)
    rows = read_rows(place)[skip : None if count is None else skip + count]
    prompts = []
    for number, row in enumerate(rows, skip):
        name, row = f"line {number + 1}", row if isinstance(row, dict) else {}
        ids, start = row.get("ids"), row.get("start", 1)
        if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, start]):
            raise ValueError(f'{place}, {name}: expected "ids", a list of token ids, and "start"')
        _check_ids(model, f"{place}, {name}", ids, start)
        prompts.append(Prompt(number=number, name=name, ids=tuple(ids), start=start))
    if not prompts:
        raise ValueError(f"{place}: no sequences")
    return _forced(place.name, prompts)


def of_rollouts(
    model: Decoder, folder: Path, *, count: int | None = None, skip: int = 0
) -> PromptSet:
    """Prompts of the rollouts that a training run kept: the first answer of every group."""
    groups = [group for step in rollout_steps(folder) for group in read_rollouts(folder, step)]
    prompts = []
    for number, group in enumerate(groups):
        answer = group.trajectories[0]
        ids, start = answer.ids.tolist(), int(np.argmax(answer.loss_mask))
        if start < 1 or start > len(ids) - 2:
            continue  # it ended at once
        _check_ids(model, f"{folder}, {group.prompt_id}", ids, start)
        prompts.append(Prompt(number=number, name=group.prompt_id, ids=tuple(ids), start=start))
    prompts = prompts[skip : None if count is None else skip + count]
    if not prompts:
        raise ValueError(f"{folder}: no rollouts of a training run (run.rollouts keeps them)")
    return _forced(f"rollouts of {folder.name}", prompts)


def _check_ids(model: Decoder, where: str, ids: Sequence[int], start: int) -> None:
    spec = model.spec
    if not 3 <= len(ids) <= spec.max_positions:
        raise ValueError(f"{where}: expected 3 to {spec.max_positions} tokens, got {len(ids)}")
    unknown = [token for token in ids if not 0 <= token < spec.vocabulary]
    if unknown:
        raise ValueError(f"{where}: token ids must be 0 to {spec.vocabulary - 1}, got {unknown[0]}")
    if not 1 <= start <= len(ids) - 2:
        raise ValueError(f"{where}: start must be 1 to {len(ids) - 2}, got {start}")


def _forced(name: str, prompts: Sequence[Prompt]) -> PromptSet:
    content = json.dumps([(prompt.ids, prompt.start) for prompt in prompts])
    return PromptSet(name=name, digest=_digest(content), mode="forced", prompts=tuple(prompts))


def _settings(*sections: ChatConfig | ColumnsConfig | None) -> str:
    """Return what settings add to a digest: nothing if they are the defaults."""
    return "".join(s.model_dump_json() for s in sections if s is not None and s != type(s)())


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
