"""`sparrow generate`."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.cli.output import AsJson, console, notes, plain, report, write

if TYPE_CHECKING:
    from sparrow.schema.sampling import Completion


def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompts in quotes, and settings as --section.key=value. Without a prompt, it is "
            "read from standard input.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="TOML file of settings; of several, later ones win.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="tiny, small, smollm2-135m (the default), a folder, or a hub name (owner/name).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="New folder for settings and completions."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts as they are, no chat template.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a model, dense or with sparse attention.

    Every setting can be given as --section.key=value, or in TOML files (demo, sparse and
    training-grade are shipped). The sections are model, sampling, attention and run;
    sparrow/schema/common.py lists all keys with their defaults. Sampling is close to greedy unless
    told otherwise.

    For example:

      sparrow generate "Why is the sky blue?"
      sparrow generate "Tell me a story" --attention.budget=192
      sparrow generate -m tiny --raw "countdown 3 5 7 reach 22 <think>"
    """
    from sparrow.engine.answer import Session
    from sparrow.schema.common import GenerateConfig
    from sparrow.schema.loading import load_config

    prompts, settings = _split(words or [])
    if not prompts and not sys.stdin.isatty():
        prompts = [text for text in [sys.stdin.read().strip()] if text]
    if not any(prompts):
        raise ValueError('no prompt: sparrow generate "What is a sparrow?"')
    settings += [f"--model.name={model}"] if model is not None else []
    settings += [f"--run.dir={out}"] if out is not None else []
    loaded = load_config(GenerateConfig, config or [], settings)

    with notes.status(plain(f"loading {loaded.model.name}")):
        session = Session.open(loaded, report=report)
    report(session.header())
    single = len(prompts) * loaded.sampling.n == 1
    stream = _print_piece if single and not as_json else None
    with notes.status("generating") if stream is None else nullcontext():
        completions = session.answer(prompts, chat=not raw, on_text=stream)
    _show(completions, streamed=stream is not None, as_json=as_json)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Prompts, and settings of the form --a.b=c; anything else that begins so is a mistake."""
    options = [word for word in words if re.match(r"--|-[A-Za-z]", word)]
    for word in options:
        if not re.match(r"--[\w-]+(\.[\w-]+)+=", word):
            raise ValueError(
                f"no option {word}; settings have the form --section.key=value, others are listed "
                f"by sparrow generate --help (a prompt that begins with a dash: on standard input)"
            )
    return [word for word in words if word not in options], options


def _print_piece(_: int, piece: str) -> None:
    write(piece, end="")


def _show(completions: "Sequence[Completion]", *, streamed: bool, as_json: bool) -> None:
    from sparrow.schema.base import to_dict

    if as_json:
        for completion in completions:
            print(json.dumps(to_dict(completion)))
    elif streamed:
        print()
    else:
        for number, completion in enumerate(completions):
            console.rule(
                f"{number}: {len(completion.token_ids)} tokens, {completion.finish_reason}"
            )
            write(completion.text or "")
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} of {len(completions)} completions failed: {failed[0]}")
