"""Words in an SVG: how wide they are, made shorter, and safe inside markup.

Nobody knows the reader's font, so widths are those of a wide one (DejaVu Sans): what fits by these
numbers fits in every common system font.
"""

import unicodedata
from collections.abc import Sequence
from html import escape

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
WIDTHS = {  # shares of the font's size
    **dict.fromkeys("ijlI'|!", 0.3),
    **dict.fromkeys(" .,:;/\\()[]-ftrJ", 0.41),
    **dict.fromkeys('ceksvxyz_"*?{}^~`', 0.6),
    **dict.fromkeys("mMwW%@&#+=<>", 0.98),
}
LOWER, UPPER, OTHER, WIDE, BOLD = 0.65, 0.8, 0.9, 1.25, 1.12


def width_of(text: str, size: float, bold: bool = False) -> float:
    """Pixels that a line of text takes at most."""
    return sum(map(_share, text)) * size * (BOLD if bold else 1.0)


def _share(character: str) -> float:
    if character in WIDTHS:
        return WIDTHS[character]
    if unicodedata.east_asian_width(character) in "WF":
        return WIDE
    if not character.isascii() and not character.isalpha():
        return OTHER if unicodedata.category(character) != "Mn" else 0.0
    return UPPER if character.isupper() else LOWER


def shortened(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or its two ends around an ellipsis where it is wider than the room.

    Names of runs share their beginnings or their ends, so both are kept.
    """
    if width_of(text, size, bold) <= room:
        return text
    for kept in range(len(text) - 1, 1, -1):
        cut = text[: (kept + 1) // 2].rstrip() + ELLIPSIS + text[-(kept // 2) :].lstrip()
        if width_of(cut, size, bold) <= room:
            return cut
    return ELLIPSIS


def distinct(names: Sequence[str], size: float, room: float) -> list[str]:
    """Names shortened to the room, numbered where two that differ would become the same."""
    cut = [shortened(name, size, room) for name in names]
    return [
        short
        if len({whole for other, whole in zip(cut, names, strict=True) if other == short}) < 2
        else f"{shortened(name, size, room - 3 * size)} ({rank})"
        for rank, (short, name) in enumerate(zip(cut, names, strict=True), 1)
    ]


def element(tag: str, body: str = "", **attributes: object) -> str:
    """Markup with every attribute escaped; `class_` is class, `stroke_width` stroke-width.

    The body is markup already. None leaves an attribute out, numbers lose needless digits.
    """
    named = {
        name.rstrip("_").replace("_", "-"): value
        for name, value in attributes.items()
        if value is not None
    }
    inside = "".join(f' {name}="{escape(_plain(value))}"' for name, value in named.items())
    return f"<{tag}{inside}>{body}</{tag}>" if body else f"<{tag}{inside}/>"


def _plain(value: object) -> str:
    return pixels(value) if isinstance(value, float) else str(value)


def pixels(value: float) -> str:
    """A place in an SVG, to a tenth."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def words(text: str, x: float, y: float, whole: str = "", **attributes: object) -> str:
    """Text at a place; where it was shortened, the whole of it is shown on hover."""
    title = element("title", escape(whole)) if whole and whole != text else ""
    return element("text", title + escape(text), x=x, y=y, **attributes)
