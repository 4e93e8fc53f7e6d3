"""Text of an answer while it is sampled: tokens to characters, and stop strings."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into text piece by piece; holds back a character that is incomplete.

    A piece is the difference that new tokens make to the text of a short window before them.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._held: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._held += tokens
        piece = self._piece()
        return "" if piece.endswith(REPLACEMENT) else self._release(piece)

    def finish(self) -> str:
        """Return what is still held back."""
        return self._release(self._piece())

    def _piece(self) -> str:
        before = self._decode(self._window)
        return self._decode(self._window + self._held)[len(before) :]

    def _release(self, piece: str) -> str:
        if piece:
            self._window, self._held = self._held, []
        return piece


class StopStrings:
    """Cuts text before the first of some strings; holds back what could be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None  # the one that ended the text

    def feed(self, text: str) -> str:
        """Return the text that is certain by now; nothing after a stop string."""
        if self.found is not None:
            return ""
        text, self._held = self._held + text, ""
        places = [(text.find(stop), stop) for stop in self._stops]
        if begun := [(place, stop) for place, stop in places if place >= 0]:
            place, self.found = min(begun)
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what is still held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
