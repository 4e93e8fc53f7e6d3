"""`sparrow flow`: is a selection formula right, how good is it, how fast does it run."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import (
    MOST,
    MOST_TOKENS,
    AsJson,
    console,
    measuring,
    progress_bar,
    report,
    show_result,
    write,
)

if TYPE_CHECKING:
    from sparrow.calibrate.flows.score import Progress
    from sparrow.calibrate.flows.texts import Text

flow = typer.Typer(
    help="Check, score and time flows: formulas that choose which tokens attention keeps. "
    "docs/flows.md shows how to write one in a few lines of Python.",
    no_args_is_help=True,
)
WHERE = "file.py[:name], module:name, or a built-in flow such as quest or 'fine_means(2)'"
File = Annotated[str, typer.Argument(metavar="FLOW", help=f"{WHERE}.")]
Files = Annotated[list[str], typer.Argument(metavar="FLOW", help=f"{WHERE}; several.")]
Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="auto (a GPU where there is one), cuda or cpu."),
]
Page = Annotated[int, typer.Option("--page", min=1, max=256, metavar="N", help="Tokens in a page.")]


@flow.command("check")
def flow_check(
    file: File,
    page: Page = 16,
    head_size: Annotated[
        int, typer.Option("--head-size", min=1, max=512, metavar="N", help="Numbers of a head.")
    ] = 128,
    group: Annotated[
        int, typer.Option("--group", min=1, max=64, metavar="N", help="Query heads of a KV head.")
    ] = 2,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Say whether a flow is sound, and show the program that is made of it.

    On random pages, decoding token by token is compared with one pass over all of them. Takes
    seconds, needs no model.

    For example:

      sparrow flow check quest
      sparrow flow check mine.py

    Exit codes: 0 sound, 1 the comparison fails, 2 the flow is broken (with its line).
    """
    from sparrow.calibrate import tables
    from sparrow.calibrate.flows import check as flow_check
    from sparrow.models.checkpoint import pick_device
    from sparrow.schema.base import to_dict
    from sparrow.sparse.flows.loading import load_flow

    chosen, target = load_flow(file), pick_device(device)
    with measuring("comparing"):
        result = flow_check.check(
            chosen, page=page, head_size=head_size, group=group, device=target
        )
    if as_json:
        print(json.dumps(to_dict(result), indent=2))
    else:
        for part in tables.flow_check_tables(result):
            console.print(part)
    raise typer.Exit(int(not result.passed))


@flow.command("score")
def flow_score(
    files: Files,
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="MODEL", help="A name, a folder, or owner/name."),
    ] = "smollm2-135m",
    budget: Annotated[
        list[int] | None,
        typer.Option(
            "--budget",
            "-b",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Tokens kept; can be given several times. Default: 512 and 1024.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FOLDER",
            help="Texts to read: .txt, .py and .md files. Default: ten known texts.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", min=2, max=MOST_TOKENS, metavar="N", help="Tokens of every text."),
    ] = 8192,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="FLOW",
            help="Flow to compare with; can be given several times. Default: block_mean and "
            "oracle.",
        ),
    ] = None,
    page: Page = 16,
    first: Annotated[
        int,
        typer.Option("--first", min=0, max=MOST, metavar="N", help="First pages, always kept."),
    ] = 1,
    last: Annotated[
        int,
        typer.Option("--last", min=1, max=MOST, metavar="N", help="Last pages, always kept."),
    ] = 2,
    dense_layers: Annotated[
        str,
        typer.Option(
            "--dense-layers", metavar="LAYERS", help="Layers that stay dense: such as 0,1, or none."
        ),
    ] = "0,1",
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="auto, float32 or bfloat16; float32 shows sparsity without rounding.",
        ),
    ] = "float32",
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="What is there is not measured a second time."
        ),
    ] = Path("runs/flow-score"),
    leaderboard: Annotated[
        Path | None,
        typer.Option(
            "--leaderboard",
            metavar="FILE",
            help="Append a JSON line for each flow and budget, with what is due to the formula "
            "and what to the configuration.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how good flows are: p05 of acceptance on long texts, beside built-in flows.

    For every budget also how many of the truly best pages were found, how much attention they
    hold, and how far off the output is. Long on a CPU: give fewer --tokens to try it. Stopped and
    started again, it goes on.

    For example:

      sparrow flow score mine.py -b 512
      sparrow flow score quest --tokens 1024 -b 256 -m smollm2-135m
    """
    from sparrow.calibrate import tables
    from sparrow.calibrate.flows.score import Store, append_leaderboard, samples, score
    from sparrow.models import load, load_tokenizer
    from sparrow.schema.flow import Configuration
    from sparrow.sparse.flows.loading import load_flow

    if leaderboard is not None and leaderboard.is_dir():
        raise ValueError(f"--leaderboard {leaderboard} is a folder: give a file")
    flows = [load_flow(file) for file in files]
    others = [load_flow(name) for name in against or ["block_mean", "oracle"]]
    layers = layers_of(dense_layers)
    configuration = Configuration(page=page, first=first, last=last, dense_layers=layers)
    given = samples(load_tokenizer(model), _texts(texts), tokens)
    with measuring(f"loading {model}"):
        loaded = load(model, dtype=dtype, device=device, report=report)
    with closing(Store(out)) as store, _progress() as progress:
        result = score(
            loaded,
            given,
            flows,
            budget or [512, 1024],
            store=store,
            against=others,
            configuration=configuration,
            reference=leaderboard is not None,
            progress=progress,
        )
    if leaderboard is not None:
        report(f"{leaderboard}: {append_leaderboard(leaderboard, result)} lines more")
    show_result(result, tables.flow_score_table, as_json=as_json)


@flow.command("bench")
def flow_bench(
    files: Files,
    device: Device = "auto",
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, max=MOST, metavar="N", help="Sequences at once."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, max=MOST_TOKENS, metavar="N", help="Tokens of every sequence."
        ),
    ] = None,
    kept: Annotated[
        int | None,
        typer.Option(
            "--kept",
            min=3,
            max=MOST,
            metavar="N",
            help="Pages that a sequence keeps, the 3 always kept included.",
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Time this one shape; no others beside it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time flows on a GPU: one layer's decoding, beside dense attention and the block mean.

    All keep the same number of pages. On a CPU it has to be asked for (--device cpu), since times
    there say nothing about a GPU.

    For example:

      sparrow flow bench mine.py
      sparrow flow bench quest --device cpu --brief
    """
    from sparrow.models.checkpoint import pick_device
    from sparrow.sparse.flows.library import block_mean
    from sparrow.sparse.flows.loading import load_flow
    from sparrow.sparse.rule import Rule

    flows = [load_flow(file) for file in files]
    if pick_device(device).type == "cpu" and device != "cpu":
        raise ValueError(
            "no GPU here, and times of a CPU say nothing about decoding; --device cpu measures "
            "anyway, at small sizes"
        )
    from sparrow.bench import layer_attention

    given = {"batch": batch, "context": context, "kept": kept}
    usual = {"batch": 1, "context": 1024, "kept": 16} if device == "cpu" else {}
    sizes: dict[str, Any] = usual | {key: n for key, n in given.items() if n is not None}
    sizes |= {"others": (), "sweep": ()} if brief else {}
    unique = dict.fromkeys([block_mean, *flows])
    rules = [Rule(flow=each, dense_layers=frozenset()) for each in unique]
    with measuring() as progress:
        result = layer_attention.run(flows=rules, device=device, progress=progress, **sizes)
    show_result(result, layer_attention.table, as_json=as_json)


@flow.command("texts")
def flow_texts(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to copy them.")],
) -> None:
    """Copy the ten texts that flows are scored on, to carry to another machine.

    There they are given as --texts to `sparrow flow score` or `sparrow calibrate`.

    For example:

      sparrow flow texts texts
    """
    from sparrow.calibrate.flows.texts import write as write_texts

    write(str(write_texts(folder, report=report)))


def _texts(folder: Path | None) -> "list[Text]":
    from sparrow.calibrate.flows import texts

    return texts.standard(report) if folder is None else texts.from_folder(folder)


def layers_of(text: str) -> tuple[int, ...]:
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"--dense-layers {text}: give numbers as 0,1 or none") from None


@contextmanager
def _progress() -> "Iterator[Progress]":
    with progress_bar() as bar:
        task = bar.add_task("reading", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield progress
