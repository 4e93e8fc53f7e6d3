"""`sparrow flow`: is a selection formula right, how good is it, how fast does it run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import AsJson, console, measuring, progress_bar, report, show_result

if TYPE_CHECKING:
    from sparrow.calibrate.flows.score import Progress
    from sparrow.calibrate.flows.texts import Text

flow = typer.Typer(
    help="Check, score and time flows: formulas that choose what attention keeps.",
    no_args_is_help=True,
)
WHERE = "file.py[:name], module:name, or a built-in flow such as quest or 'fine_means(2)'"
File = Annotated[str, typer.Argument(metavar="FILE", help=f"The flow: {WHERE}.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help=f"Flows: {WHERE}.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]


@flow.command("check")
def flow_check(
    file: File,
    page: Annotated[int, typer.Option("--page", min=1, help="Tokens in a page.")] = 16,
    head_size: Annotated[int, typer.Option("--head-size", min=1, help="Of a head.")] = 128,
    group: Annotated[int, typer.Option("--group", min=1, help="Query heads of a KV head.")] = 2,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Build a flow and show its program, then compare decoding with one pass on random pages.

    Exits 2 with the author's line if the flow is broken, 1 if the comparison fails.
    """
    from sparrow.calibrate.flows import check as flow_check
    from sparrow.calibrate.flows import tables as flow_tables
    from sparrow.models.checkpoint import pick_device
    from sparrow.sparse.flows.loading import load_flow

    chosen, target = load_flow(file), pick_device(device)
    with measuring("comparing"):
        result = flow_check.check(
            chosen, page=page, head_size=head_size, group=group, device=target
        )
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        for part in flow_tables.checked(result):
            console.print(part)
    raise typer.Exit(int(not result["passed"]))


@flow.command("score")
def flow_score(
    files: Files,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name or folder, as for generate.")
    ] = "smollm2-135m",
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", "-b", help="Tokens kept; several. Default: 512 1024."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="Folder of .txt, .py, .md files; default: ten known texts."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of every text.")] = 8192,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="Flows to compare with. Default: block_mean oracle."),
    ] = None,
    page: Annotated[int, typer.Option("--page", min=1, help="Tokens in a page.")] = 16,
    first: Annotated[int, typer.Option("--first", min=0, help="First pages, always kept.")] = 1,
    last: Annotated[int, typer.Option("--last", min=1, help="Last pages, always kept.")] = 2,
    dense_layers: Annotated[
        str, typer.Option("--dense-layers", help="Layers that stay dense, as 0,1; or none.")
    ] = "0,1",
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 shows sparsity alone, without rounding.")
    ] = "float32",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Run folder; what is measured there is not again.")
    ] = Path("runs/flow-score"),
    leaderboard: Annotated[
        Path | None, typer.Option("--leaderboard", help="Append a JSON line a flow and budget.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """p05 of exact acceptance on long texts, under several budgets, beside built-in flows.

    Also recall of the true top pages, kept attention mass and output error. Started again it goes
    on; a leaderboard tells what the formula gained from what the configuration gained.
    """
    from sparrow.calibrate.flows import tables as flow_tables
    from sparrow.calibrate.flows.score import Configuration, samples, score
    from sparrow.calibrate.flows.store import Store, append_leaderboard
    from sparrow.models import load, load_tokenizer
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
    with _progress() as progress:
        result = score(
            loaded,
            given,
            flows,
            budget or [512, 1024],
            store=Store(out),
            against=others,
            configuration=configuration,
            reference=leaderboard is not None,
            progress=progress,
        )
    if leaderboard is not None:
        report(f"{leaderboard}: {append_leaderboard(leaderboard, result)} lines more")
    show_result(result, flow_tables.scored, as_json=as_json)


@flow.command("bench")
def flow_bench(
    files: Files,
    device: Device = "auto",
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Rows.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of every row.")
    ] = None,
    kept: Annotated[
        int | None, typer.Option("--kept", min=3, help="Pages a row keeps, 3 reserved.")
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="This one shape; no other contexts and lengths.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Decode time of one layer at matched budget, beside dense attention and the block mean."""
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
    folder: Annotated[Path, typer.Argument(help="Where to copy the ten texts of `flow score`.")],
) -> None:
    """Copy the texts that flows are scored on, for `--texts` on another machine."""
    from sparrow.calibrate.flows.texts import write

    print(write(folder, report=report))


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
