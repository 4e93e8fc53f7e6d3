"""`sparrow report`: one page for runs."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sparrow.cli.output import report as note
from sparrow.cli.output import write

FORMATS = ("html", "md")
PAGES = (".html", ".md")  # what may be written over


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Run directories of train, calibrate or demo: up to six."
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format", "-f", metavar="NAME", help="html, a page; or md, for a pull request."
        ),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write, - for the terminal. Default: report.html in the run, or "
            "comparison.html in the first of several; md goes to the terminal.",
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="Default: names of the runs.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make one page of run directories: the surface, the schedule, curves by step and by time.

    Several runs are compared: each curve in one chart, a final table with intervals, settings that
    differ. The page holds everything it needs and opens offline. It is made from files alone, so
    the same files give the same page.

    For example:

      sparrow report runs/demo --open
      sparrow report runs/train/sparse runs/train/dense -o comparison.html
    """
    from sparrow.files import write_whole
    from sparrow.report.markdown import markdown
    from sparrow.report.render import html
    from sparrow.report.run_page import page_of

    if format not in FORMATS:
        raise ValueError(f"--format {format}: give html or md")
    page = page_of(runs, title=title)
    text = markdown(page) if format == "md" else html(page)
    place = out or (Path("-") if format == "md" else runs[0] / _name(runs))
    if str(place) == "-":
        if open_page:
            raise ValueError("--open needs a file: give --out")
        write(text)
        return
    if place.is_dir() or (place.exists() and place.suffix not in PAGES):
        raise ValueError(f"--out {place}: it is there and is no page; name a file, such as a.html")
    place.parent.mkdir(parents=True, exist_ok=True)
    if out is None:  # in a folder that may be a stranger's: no link is followed
        write_whole(place, [text])
    else:
        place.write_text(text, encoding="utf-8")
    note(f"{len(text) / 1024:.0f} KiB")
    write(str(place))
    if open_page:
        webbrowser.open(place.resolve().as_uri())


def _name(runs: list[Path]) -> str:
    """A comparison does not take the place of a run's own page."""
    return "report.html" if len(runs) == 1 else "comparison.html"
