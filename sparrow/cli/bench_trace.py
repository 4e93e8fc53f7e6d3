"""`sparrow bench trace`: the published workload on this GPU, as a share of what bytes allow."""

from typing import Annotated

import typer

from sparrow.cli.output import MOST, MOST_TOKENS, AsJson, measuring, show_result


def bench_trace(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="SHAPE",
            help="Published shape with random weights, such as qwen3-8b.",
        ),
    ] = "qwen3-1.7b",
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help="A preset, or fixed-N (N tokens kept). Default: the shape's preset at 0.86.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="bf16 (the default) or fp32.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST, metavar="N", help="Requests of the workload.")
    ] = 60,
    longest: Annotated[
        int, typer.Option(min=17, max=MOST_TOKENS, metavar="N", help="Longest request, in tokens.")
    ] = 32_768,
    cutoff: Annotated[
        int,
        typer.Option(
            min=17, max=MOST_TOKENS, metavar="N", help="Longest request of the complete run."
        ),
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Predict a rollout of the published workload on this GPU from steps measured one by one.

    Steps are timed at many lengths and batches, dense and sparse, and added up over the workload,
    beside what bytes alone would allow. A complete run of the workload, cut short, confirms it.

    For example:

      sparrow bench trace -m qwen3-1.7b
    """
    from sparrow.bench import trace

    with measuring() as progress:
        result = trace.run(
            model=model,
            schedule=schedule,
            dtype=dtype,
            requests=requests,
            longest=longest,
            cutoff=cutoff,
            progress=progress,
        )
    show_result(result, trace.table, as_json=as_json)
