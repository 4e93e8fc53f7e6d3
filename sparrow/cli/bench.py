"""`sparrow bench`: measurements of this machine."""

import re
from typing import Annotated, Any

import typer

from sparrow.cli.bench_trace import bench_trace
from sparrow.cli.output import MOST, MOST_TOKENS, AsJson, measuring, show_result

bench = typer.Typer(
    help="Measure the speed of this machine. Figures of two machines, or of two runs on a busy "
    "one, are best compared by their ratios.",
    no_args_is_help=True,
)
WHOLE = r"[0-9]{1,9}"
MOST_IN_CASE = 2**28  # tokens
Device = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="auto (a GPU where there is one), cuda or cpu."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="SHAPE",
        help="Published shape with random weights, such as qwen3-1.7b. Default: by the machine.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="NAME", help="bf16 or fp32. Default: bf16 on a GPU, fp32 on a CPU."
    ),
]


@bench.command("attention")
def bench_attention(
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time decode attention, dense beside sparse, against how fast memory can be read.

    On a GPU it is one layer's work: score and select pages, attend, append. On a CPU the times are
    also given as a ratio to a plain read of memory in the same run.

    For example:

      sparrow bench attention --device cpu
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
    model: Shape = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="batch,context or batch,context,schedule, where the schedule is a preset's name "
            "or fixed-N (N tokens kept); can be given several times. Default: by the machine.",
        ),
    ] = None,
    flow: Annotated[
        str,
        typer.Option(
            "--flow",
            metavar="FLOW",
            help="What chooses the tokens to keep: a built-in name or FILE[:name].",
        ),
    ] = "block_mean",
    dtype: Dtype = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=MOST, metavar="N", help="Steps timed in a round.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Time whole decode steps of the engine, dense beside sparse, and say where the time goes.

    Also given: the bytes that a step reads, and on a GPU that we know their share of its peak.

    For example:

      sparrow bench decode
      sparrow bench decode --case 16,4096 --case 16,4096,fixed-512
    """
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
        str | None,
        typer.Argument(
            metavar="WORKLOAD", help="gpu, cpu-tiny or cpu-smollm2. Default: by the machine."
        ),
    ] = None,
    dtype: Dtype = None,
    peer: Annotated[bool, typer.Option(help="Also run transformers' generate.")] = True,
    peer_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TOKENS, metavar="N", help="Its new tokens. Default: by the workload."
        ),
    ] = None,
    batching: Annotated[
        bool, typer.Option(help="On a GPU: also transformers' continuous batching.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Time whole rollouts, in tokens per second, beside transformers on the same weights.

    Both sides have the same prompts, dtype and device, in the same run.

    For example:

      sparrow bench rollout cpu-tiny
    """
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
    model: Shape = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="sequences,tokens and, if wanted, ,recompute and ,compiled after it; can be given "
            "several times. Default: by the machine.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=MOST, metavar="N", help="Steps timed.")
    ] = 5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time optimiser steps: seconds, share of the tensor cores' peak, memory and its prediction.

    On a CPU the shape is cut to two layers.

    For example:

      sparrow bench train
      sparrow bench train -m qwen3-1.7b --case 4,4096,recompute
    """
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

    match = re.fullmatch(rf"({WHOLE}),({WHOLE})(,recompute)?(,compiled)?", text)
    if match is None or not int(match[1]) or int(match[2]) < 2:
        raise ValueError(f"--case {text[:80]}: give sequences,tokens[,recompute][,compiled]")
    _refuse_tokens(text, int(match[1]) * int(match[2]))
    return Case(
        sequences=int(match[1]),
        length=int(match[2]),
        recompute=match[3] is not None,
        compiled=match[4] is not None,
    )


def _case(text: str) -> tuple[int, int, str | None]:
    """batch,context or batch,context,schedule."""
    match = re.fullmatch(rf"({WHOLE}),({WHOLE})(?:,(.+))?", text)
    if match is None:
        raise ValueError(f"--case {text[:80]}: give batch,context or batch,context,schedule")
    batch, context, schedule = match.groups()
    if not int(batch) or int(context) < 2:
        raise ValueError(f"--case {text}: a batch of at least 1 and a context of at least 2")
    _refuse_tokens(text, int(batch) * int(context))
    return int(batch), int(context), schedule


def _refuse_tokens(case: str, tokens: int) -> None:
    if tokens > MOST_IN_CASE:
        raise ValueError(f"--case {case}: {tokens} tokens in all, allowed: at most {MOST_IN_CASE}")


bench.command("trace")(bench_trace)
