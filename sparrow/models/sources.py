"""Locates models: in the package, a folder, the package index or a hub; and their provenance."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from sparrow.files import SUMS, file_digest, has_sums
from sparrow.models.decoder import Decoder
from sparrow.models.fetch import fetch, known
from sparrow.models.spec import CONFIG
from sparrow.schema.run_folder import MODEL

SHIPPED = Path(__file__).parent / "shipped"
# The sha256 of each shipped model's SHA256SUMS, which lists its card too: both are renewed with it.
PINNED = {
    "small": "3747bdd7aceb0208056487e4a88425b339125f4cc2d1657c15e9b1177dd033b5",
    "small-rl": "f0aeef8a2ea5d6980c407ec838abd7aafa7651572547797a78b5b3e90facb6da",
    "tiny": "d311f4b86dee5d406522e05bfc608a97f4b54416ad053ef959aecacf04d59b19",
}
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", SUMS)  # of a hub's model


def locate(
    path_or_name: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
) -> Path:
    """The folder of a model, fetched or downloaded where need be; of a run, that of its model.

    The name of a shipped model is that model, whatever the current directory holds: ./tiny is a
    folder of that name.
    """
    name = os.fspath(path_or_name)
    if not name:
        raise ValueError("no model was named")
    folder = Path(os.path.expanduser(name))  # unlike Path's, it does not raise for ~nobody
    if name in shipped():
        return _checked_folder(SHIPPED / name)
    if folder.is_dir():
        ended_run = not (folder / CONFIG).exists() and (folder / MODEL / CONFIG).is_file()
        return _checked_folder((folder / MODEL if ended_run else folder).resolve())
    if name in known():
        folder = fetch(name, report=report)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} is damaged: run sparrow fetch {name} --force")
        return folder
    if split_revision(name)[0].count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise ValueError(
        f"no model {name!r}: it is no folder, no hub name (owner/name), "
        f"and not one of {', '.join((*shipped(), *known()))}"
    )


def shipped() -> tuple[str, ...]:
    """The names of the models that are part of the package."""
    return tuple(sorted(folder.name for folder in SHIPPED.iterdir() if folder.is_dir()))


def split_revision(name: str) -> tuple[str, str | None]:
    """A hub name without its revision (a commit, tag or branch), and that: owner/name@revision."""
    if os.path.lexists(os.path.expanduser(name)):
        return name, None
    repository, _, revision = name.partition("@")
    return repository, revision or None


def provenance(model: Decoder) -> str:
    """Return how a model's files were verified, in a word or two for headers."""
    folder = model.source
    if folder is None:
        return "random weights"
    if _is_shipped(folder):
        return "pinned"
    if _is_snapshot(folder):
        return f"revision {folder.name[:12]}"
    return "verified" if has_sums(folder) else "unverified"


def model_name(model: Decoder) -> str:
    """What a model is called: the name of its folder, or of its repository on the hub."""
    folder = model.source
    if folder is None:
        return "random weights"
    return folder.parents[1].name.rpartition("--")[2] if _is_snapshot(folder) else folder.name


def _is_snapshot(folder: Path) -> bool:
    """Whether a folder lies in the hub's cache: models--OWNER--NAME/snapshots/REVISION."""
    return folder.parent.name == "snapshots" and bool(re.fullmatch("[0-9a-f]{40}", folder.name))


def policy_folders(folder: Path) -> list[Path]:
    """The models of a run of several policies, by the folder of the run or of its models."""
    place = folder if folder.name == MODEL else folder / MODEL
    return sorted(config.parent for config in place.glob(f"*/{CONFIG}"))


def _checked_folder(folder: Path) -> Path:
    if not (folder / CONFIG).is_file():
        if policies := policy_folders(folder):
            named = ", ".join(map(str, policies))
            raise ValueError(f"{folder} has several policies: {named}; give one of them")
        raise ValueError(
            f"{folder} is neither a Hugging Face folder (no {CONFIG}) nor a run that has ended (no "
            f"{MODEL}/{CONFIG}); a run that goes on: sparrow eval {folder} --checkpoint latest"
        )
    if _is_shipped(folder):
        sums = folder / SUMS
        if not sums.is_file() or file_digest(sums) != PINNED.get(folder.name):
            raise ValueError(f"{sums} is not that of the package; install the package again")
    return folder


def _is_shipped(folder: Path) -> bool:
    return folder.parent.resolve() == SHIPPED.resolve()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, revision = split_revision(name)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_WANTED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the hub could not give {name!r} ({type(error).__name__}: {error}). Download the "
            f"model where there is a network and pass its folder, or use "
            f"{', '.join((*shipped(), *known()))}"
        ) from error
