"""`sparrow bench`: measurements of this machine."""

import re
from typing import Annotated, Any

import typer

from sparrow.cli.bench_trace import bench_trace
from sparrow.cli.output import AsJson, measuring, show_result

bench = typer.Typer(help="Measure this machine; figures to compare by ratio.", no_args_is_help=True)


@bench.command("attention")
def bench_attention(
    device: Annotated[
        str, typer.Option("--device", help="auto (a GPU where there is one), cuda or cpu.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode attention against memory bandwidth, dense beside sparse.

    On a GPU one layer's: score and select, attend, append, in CUDA graphs. On a CPU as a ratio to
    a plain memory read in the same run.
    """
    from sparrow.models.checkpoint import pick_device

    kind = pick_device(device).type
    if kind == "cuda":
        _on_gpu(device, as_json)
    elif kind == "cpu":
        _on_cpu(as_json)
    else:
        raise ValueError(f"--device {device}: give auto, cuda or cpu")


def _on_gpu(device: str, as_json: bool) -> None:
    from sparrow.bench import layer_attention

    with measuring() as progress:
        result = layer_attention.run(device=device, progress=progress)
    show_result(result, layer_attention.table, as_json=as_json)


def _on_cpu(as_json: bool) -> None:
    from sparrow.bench import decode_attention

    with measuring() as progress:
        result = decode_attention.run(progress=progress)
    show_result(result, decode_attention.table, as_json=as_json)


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
    flow: Annotated[
        str, typer.Option("--flow", help="What chooses pages: FILE[:name] or a built-in name.")
    ] = "block_mean",
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp32.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps timed in a round.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Decode steps of the whole engine against memory bandwidth, dense beside sparse."""
    from sparrow.bench import decode
    from sparrow.sparse.flows.loading import load_flow

    chosen: dict[str, Any] = {"flow": load_flow(flow), "dtype": dtype, "steps": steps}
    cases = [_case(text) for text in case] if case else None
    with measuring() as progress:
        result = decode.run(model=model, cases=cases, progress=progress, **chosen)
    show_result(result, decode.table, as_json=as_json)


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
    with measuring() as progress:
        changes: dict[str, Any] = {} if peer_tokens is None else {"peer_tokens": peer_tokens}
        changes |= {} if batching else {"batching_tokens": 0}
        result = rollout.run(preset=chosen, dtype=dtype, peer=peer, progress=progress, **changes)
    show_result(result, rollout.table, as_json=as_json)


@bench.command("train")
def bench_train(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Published shape, such as qwen3-1.7b.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="sequences,tokens[,recompute][,compiled]; several. Default: by machine."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps timed.")] = 5,
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Optimiser steps: seconds, share of the tensor cores' peak, memory beside its prediction."""
    from sparrow.bench import training

    cases = [_train_case(text) for text in case] if case else None
    with measuring() as progress:
        result = training.run(
            model=model, cases=cases, device=device, steps=steps, progress=progress
        )
    show_result(result, training.table, as_json=as_json)


def _train_case(text: str) -> Any:
    """sequences,tokens and how."""
    from sparrow.bench.training import Case

    match = re.fullmatch(r"(\d+),(\d+)(,recompute)?(,compiled)?", text)
    if match is None or not int(match[1]) or int(match[2]) < 2:
        raise ValueError(f"--case {text}: give sequences,tokens[,recompute][,compiled]")
    return Case(
        sequences=int(match[1]),
        length=int(match[2]),
        recompute=match[3] is not None,
        compiled=match[4] is not None,
    )


def _case(text: str) -> tuple[int, int, str | None]:
    """batch,context or batch,context,schedule."""
    match = re.fullmatch(r"(\d+),(\d+)(?:,(.+))?", text)
    if match is None:
        raise ValueError(f"--case {text}: give batch,context or batch,context,schedule")
    batch, context, schedule = match.groups()
    if not int(batch) or int(context) < 2:
        raise ValueError(f"--case {text}: a batch of at least 1 and a context of at least 2")
    return int(batch), int(context), schedule


bench.command("trace")(bench_trace)
