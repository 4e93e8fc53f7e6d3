"""All figures of a surface, and the files they become: whatever the data allows."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparrow.report.cell_plots import distribution, estimators, layers, telling_line
from sparrow.report.files import read
from sparrow.report.length_plots import budgets, means, sizes_of, tails
from sparrow.report.panels import Plain
from sparrow.report.style import save
from sparrow.report.surface_words import variants_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["budgets", "distribution", "estimators", "layers", "means", "tails", "write_surface"]


def write_surface(path: str | Path, folder: str | Path) -> list[Path]:
    """Draw a surface's file as SVG and PNG into a folder; the paths, in the order of reading."""
    surface = read(path, "cells", "surface: sparrow calibrate makes one")
    if not surface["cells"]:
        raise ValueError(f"surface {path} has no cells: nothing to draw")
    return [made for name, draw in _figures(surface) for made in save(draw(), Path(folder) / name)]


def _figures(surface: Plain) -> Iterator[tuple[str, Callable[[], "Figure"]]]:
    """Names of files and how each is drawn; figures of one variant are named after it."""
    yield "tails", partial(tails, surface)
    yield "means", partial(means, surface)
    if sizes_of(surface):
        yield "budgets", partial(budgets, surface)
    if surface["layers"]:
        yield "layers", partial(layers, surface)
    names = variants_of(surface)
    for name in names:
        end = f"-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}" if len(names) > 1 else ""
        yield f"distribution{end}", partial(distribution, surface, name)
        if telling_line(surface, name):
            yield f"estimators{end}", partial(estimators, surface, name)
