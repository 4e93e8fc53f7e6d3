"""`sparrow bench trace`: the published workload on this GPU, as a share of what bytes allow."""

from typing import Annotated

import typer

from sparrow.cli.output import AsJson, measuring, show_result


def bench_trace(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Published shape, such as qwen3-8b.")
    ] = "qwen3-1.7b",
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", help="A preset's name or fixed-N; default: the model's at 0.86."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp32.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the workload.")] = 60,
    longest: Annotated[int, typer.Option(min=17, help="Where their lengths end.")] = 32_768,
    cutoff: Annotated[
        int, typer.Option(min=17, help="Where lengths of the complete run end.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Whole rollouts of the published workload: measured steps, added up over its trace.

    Dense beside sparse, against the bytes-only limit; one complete run, cut short, confirms it.
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
