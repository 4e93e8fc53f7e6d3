"""Tokenizers of model folders, by transformers; whatever is wrong with their files is a ValueError.

A tokenizer is data. The classes that read it are named here: transformers would take any of its
own that a file names, models and code from a hub included.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparrow.files import cached_digest, verify
from sparrow.models.decoder import Decoder
from sparrow.models.sources import locate
from sparrow.models.spec import CONFIG, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
# Files that make up a tokenizer and its chat template; copied byte for byte when a model is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"  # a folder that transformers reads too
# Classes of Qwen and Llama tokenizers; each also with "Fast" at its end.
_CLASSES = (
    "PreTrainedTokenizer",
    "TokenizersBackend",
    "Qwen2Tokenizer",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
)
_OTHER_FILES = ("fast_tokenizer_files", "gguf_file")  # keys that name files to read instead


def load_tokenizer(path_or_name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model folder or name, by transformers."""
    from transformers import AutoTokenizer

    folder = locate(path_or_name)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES[:2]):
        raise ValueError(f"{folder}: it holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})")
    verify(folder, (CONFIG, *tokenizer_names(folder)))
    for name in (CONFIG, TOKENIZER_CONFIG):
        _refuse_other_code(folder / name)
    try:
        with library_errors("the tokenizer cannot be read"):
            # Unless told not to, transformers asks on the terminal whether to run a folder's code.
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ValueError as error:
        raise ValueError(f"{folder / _damaged(folder)}: {error}") from error


def tokenizer_names(folder: Path) -> list[str]:
    """The names of files that a tokenizer may consist of, in this folder."""
    return [
        *TOKENIZER_FILES,
        *sorted(f"{_TEMPLATES}/{file.name}" for file in (folder / _TEMPLATES).glob("*.jinja")),
    ]


def tokenizer_digest(folder: Path) -> str:
    """The sha256 of a folder's tokenizer: names and content of its files, which are verified."""
    names, digest = sorted(tokenizer_names(folder)), hashlib.sha256()
    verify(folder, names)
    for name in names:
        if (folder / name).is_file():
            digest.update(f"{name} {cached_digest(folder / name)}\n".encode())
    return digest.hexdigest()


def model_identity(model: Decoder) -> str:
    """A digest of what decides a model's function and text, apart from its weights."""
    tokenizer = "" if model.source is None else tokenizer_digest(Path(model.source))
    return hashlib.sha256(f"{model.spec!r} {tokenizer}".encode()).hexdigest()[:16]


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn any exception of a library into a ValueError that begins with `problem`.

    The except is broad because damaged files make tokenizers and transformers raise anything: bare
    Exceptions, and where Rust panics what is no Exception at all.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {type(error).__name__}: {str(error)[:500]}") from error


def _refuse_other_code(file: Path) -> None:
    """Refuse a file that names another class than a tokenizer's, or other files to read."""
    config = read_json(file) if file.is_file() else {}
    name = config.get("tokenizer_class")
    if name is not None and not (isinstance(name, str) and name.removesuffix("Fast") in _CLASSES):
        raise ValueError(
            f"{file}: tokenizer_class {name if isinstance(name, str) else type(name)!r:.80} is "
            f"not supported, only {', '.join(_CLASSES)} are"
        )
    for key in _OTHER_FILES:
        if config.get(key) is not None:
            raise ValueError(f"{file}: {key} is not supported; remove the key")


def _damaged(folder: Path) -> str:
    """The file that is no JSON, or else all that a tokenizer is made of."""
    names = [name for name in (*TOKENIZER_FILES, CONFIG) if (folder / name).is_file()]
    for name in (name for name in names if name.endswith(".json")):
        try:
            read_json(folder / name)
        except ValueError:
            return name
    return ", ".join(names)
