"""Long texts that every installation has: documentation and sources of what Sparrow installs.

Ten to search flows with, six to validate what was found, eight held out (`SPLITS`).

They are found, not shipped: texts.json says where. Each has the sha256 of the file it was measured
with; another version of its package has another text, which is said and never hidden: figures are
then not comparable. `write` copies them into a folder, which another machine reads with
`from_folder`.
"""

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from sparrow.files import read_text

CUT = 48_000  # characters: what 8192 tokens need at most (5.8 a token; ours have 2.7 to 4.6)
ENDINGS = (".txt", ".py", ".md")
METADATA = "METADATA"
Split = Literal["search", "validation", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)


class Text(NamedTuple):
    """A text to read: at most CUT characters. The note says what is unusual about it."""

    name: str
    kind: str
    text: str
    note: str = ""


class TextSource(NamedTuple):
    """Where a text is found: a file of a package or module, or METADATA of a distribution.

    sha256 is that of the whole file, as it was measured in docs/log.md.
    """

    name: str
    kind: str
    package: str
    path: str  # inside the package; "" is the module itself
    sha256: str
    split: Split = "search"

    def file(self) -> Path:
        """The file, wherever this Python has it; ValueError where it has none."""
        path = self._in_metadata() if self.path == METADATA else self._in_package()
        if path is None or not path.is_file():
            raise ValueError(
                f"text {self.name!r}: {self.package} has no {self.path or 'source'} here; give a "
                "folder of texts instead"
            )
        return path

    def _in_package(self) -> Path | None:
        spec = find_spec(self.package)
        if spec is None or not self.path:
            return None if spec is None else Path(spec.origin or "")
        return Path((spec.submodule_search_locations or [""])[0]) / self.path

    def _in_metadata(self) -> Path | None:
        try:
            held = distribution(self.package).files or []
        except PackageNotFoundError:
            return None
        matches = [file for file in held if file.match(f"*.dist-info/{METADATA}")]
        return Path(str(matches[0].locate())) if matches else None

    def read(self) -> Text:
        data = self.file().read_bytes()
        note = (
            f"{self.name}: this {self.package} is another version than the one that was measured; "
            "figures on it are not comparable with published ones"
        )
        same = hashlib.sha256(data).hexdigest() == self.sha256
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")[:CUT]
        return Text(self.name, self.kind, text, "" if same else note)


_LISTED = files(__package__).joinpath("texts.json").read_text(encoding="utf-8")
SOURCES = tuple(TextSource(**about) for about in json.loads(_LISTED))


def standard(report: Callable[[str], None] | None = None, split: Split = "search") -> list[Text]:
    """The texts of a split; what differs from the measured ones is reported."""
    texts = [source.read() for source in SOURCES if source.split == split]
    for note in (text.note for text in texts if text.note):
        (report or (lambda _: None))(note)
    return texts


def write(
    folder: str | Path, report: Callable[[str], None] | None = None, split: Split = "search"
) -> Path:
    """Copy the texts of a split, as far as they are read, into a folder; for another machine."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for text in standard(report, split):
        (place / f"{text.name}.txt").write_bytes(text.text.encode())
    return place


def from_folder(folder: str | Path) -> list[Text]:
    """Every .txt, .py and .md file of a folder, by name."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"no folder {place}")
    kinds = {source.name: source.kind for source in SOURCES}
    texts: dict[str, Text] = {}
    for file in sorted(file for file in place.iterdir() if file.suffix in ENDINGS):
        name, text = file.stem, read_text(file, "text")[:CUT]
        if name in texts:
            raise ValueError(f"{place}: two texts are called {name!r}")
        texts[name] = Text(name, kinds.get(name, file.suffix[1:]), text)
    if not texts:
        raise ValueError(f"{place}: no text in it; texts end in {', '.join(ENDINGS)}")
    return list(texts.values())
