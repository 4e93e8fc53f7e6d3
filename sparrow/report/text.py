"""Text in a drawing: how wide it is, made shorter, broken into lines, kept apart.

Nobody knows the reader's font, so widths are those of a wide one (DejaVu Sans): what fits by these
numbers fits in every common system font.
"""

import unicodedata
from collections.abc import Sequence

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


def wrapped(text: str, size: float, room: float, bold: bool = False) -> list[str]:
    """Lines that fit into the room; a word that is too long for a line loses its middle."""
    lines: list[str] = []
    for word in text.split():
        word = shortened(word, size, room, bold)
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(joined, size, bold) <= room:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def spread(
    wanted: Sequence[float], holds: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """The places nearest to the wanted ones that are at least a gap apart, between low and high.

    Least squares, weighted by how much each holds to its place: labels that would touch move
    together, around the mean of what they want. Where there is no room for the gaps, they shrink.
    """
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, float, int]] = []  # labels that touch: mean place, hold, how many
    for rank, i in enumerate(order):
        blocks.append((wanted[i] - rank * gap, holds[i], 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, v, m), (b, w, n) = blocks[-2:]
            blocks[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    level = [place for place, _, count in blocks for _ in range(count)]
    highest = high - (len(wanted) - 1) * gap
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = max(min(level[rank], highest), low) + rank * gap
    return places
