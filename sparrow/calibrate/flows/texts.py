"""Ten long texts that every installation has: documentation and sources of what Sparrow installs.

They are found, not shipped. Each has the sha256 of the file it was measured with; another version
of its package has another text, which is said and never hidden: figures are then not comparable.
`write` copies them into a folder, which another machine reads with `from_folder`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sparrow.files import check_regular

CUT = 48_000  # characters: what 8192 tokens need at most (5.8 a token; ours have 2.7 to 4.6)
ENDINGS = (".txt", ".py", ".md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to read: at most CUT characters. The note says what is unusual about it, if anything.

    sha256 is that of the characters that are read.
    """

    name: str
    kind: str
    text: str
    note: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Source(NamedTuple):
    """Where a text is found: a file of a package or module, or METADATA of a distribution.

    sha256 is that of the whole file, as it was measured in docs/log.md.
    """

    name: str
    kind: str
    package: str
    path: str  # inside the package; "" is the module itself
    sha256: str

    def file(self) -> Path:
        """The file, wherever this Python has it; ValueError where it has none."""
        found = _metadata(self.package) if self.path == METADATA else self._of_package()
        if found is None or not found.is_file():
            raise ValueError(
                f"text {self.name!r}: {self.package} has no {self.path or 'source'} here; give a "
                "folder of texts instead"
            )
        return found

    def _of_package(self) -> Path | None:
        spec = find_spec(self.package)
        if spec is None:
            return None
        if not self.path:
            return Path(spec.origin or "")
        return Path((spec.submodule_search_locations or [""])[0]) / self.path

    def read(self) -> Text:
        data = self.file().read_bytes()
        note = "" if hashlib.sha256(data).hexdigest() == self.sha256 else self._other()
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")[:CUT]
        return Text(name=self.name, kind=self.kind, text=text, note=note)

    def _other(self) -> str:
        return (
            f"{self.name}: this {self.package} is another version than the one that was measured; "
            "figures on it are not comparable with published ones"
        )


METADATA = "METADATA"
SOURCES = (
    Source(
        "python-topics",
        "prose: language documentation",
        "pydoc_data",
        "topics.py",
        "abaa56a64551d8eead1b19cbae3c6db443f99f0cab81df07bed3cb75c0db9346",
    ),
    Source(
        "regex-manual",
        "prose: manual",
        "regex",
        METADATA,
        "9d4652369c84b7ccd4071445ccf421f2e1e31c4470d6736e6d5c9c49cba6d954",
    ),
    Source(
        "pydantic-changes",
        "prose: changelog",
        "pydantic",
        METADATA,
        "c3eb8984172bedc8e056655e1419351f4497374a91b7b709dbc4a1340f50e1e9",
    ),
    Source(
        "torch-reference",
        "prose and formulas: reference documentation",
        "torch",
        "_torch_docs.py",
        "38bd167709f8998348da6aaa926b3af3cf2d6e8eb525ac3026d58a256ade1b90",
    ),
    Source(
        "transformers-generation",
        "Python: library code with long docstrings",
        "transformers",
        "generation/utils.py",
        "966f70ba83d94c9ce07b21150be49ff84b24eadbf9c47de052a1fb0f8ba38679",
    ),
    Source(
        "rich-console",
        "Python: typed application code",
        "rich",
        "console.py",
        "4533fc66963623a2a21447b501d6f51f8cfee7e14775178093a5e6eb61dc135a",
    ),
    Source(
        "python-decimal",
        "Python: algorithms with doctests",
        "_pydecimal",
        "",
        "14cf1bf7ead78a0beb578f19ebc4ec82f542e0879f5b77d327f01abf74591586",
    ),
    Source(
        "torch-tensor-impl",
        "C++: header",
        "torch",
        "include/c10/core/TensorImpl.h",
        "44551659c6cada800f4b3789b6d3b99de9d2864669505b2e667750e244d6753b",
    ),
    Source(
        "numpy-array-types",
        "C: header",
        "numpy",
        "_core/include/numpy/ndarraytypes.h",
        "f166bb8ae8128bc0130957befdd62dfd415275465de82ff87d8efd31a4731d9b",
    ),
    Source(
        "gguf-constants",
        "data: tables of names",
        "gguf",
        "constants.py",
        "19e98ab20fb4d197efb4e23e5fc8de21a8c0d528af1dffc14695af84a0015f24",
    ),
)


def standard(report: Callable[[str], None] | None = None) -> list[Text]:
    """The ten texts; what differs from the measured ones is reported."""
    texts = [source.read() for source in SOURCES]
    for note in (text.note for text in texts if text.note):
        (report or (lambda _: None))(note)
    return texts


def write(folder: str | Path, report: Callable[[str], None] | None = None) -> Path:
    """Copy the ten texts, as far as they are read, into a folder; for another machine."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for text in standard(report):
        (place / f"{text.name}.txt").write_bytes(text.text.encode())
    return place


def from_folder(folder: str | Path) -> list[Text]:
    """Every .txt, .py and .md file of a folder, by name."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"no folder {place}")
    files = sorted(file for file in place.iterdir() if file.suffix in ENDINGS)
    if not files:
        raise ValueError(f"{place}: no text in it; texts end in {', '.join(ENDINGS)}")
    _check_names(files)
    return [_of_file(file) for file in files]


def _of_file(file: Path) -> Text:
    check_regular(file, "text")
    try:
        text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")[:CUT]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: {error}") from error
    kinds = {source.name: source.kind for source in SOURCES}
    return Text(name=file.stem, kind=kinds.get(file.stem, file.suffix[1:]), text=text)


def _check_names(files: Sequence[Path]) -> None:
    names = [file.stem for file in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{files[0].parent}: two texts are called {twice[0]!r}")


def _metadata(name: str) -> Path | None:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return None
    found = [file for file in files if file.match(f"*.dist-info/{METADATA}")]
    return Path(str(found[0].locate())) if found else None
