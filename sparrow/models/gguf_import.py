"""GGUF in, Hugging Face folder out: llama.cpp's names and orders in those that everything reads.

This is no reader of any GGUF file: the content of the only one is known by its sha256, which
`fetch` has checked before. It holds SmolLM2: a plain Llama, its vocabulary and its chat template.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

from sparrow.models.decoder import Decoder
from sparrow.models.rope import Rope
from sparrow.models.spec import CONFIG, GENERATION_CONFIG, ModelSpec, spec_to_hf, write_json
from sparrow.models.weights import WEIGHTS, hf_views, save_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Metadata = dict[str, Any]


def convert(source: Path, folder: Path) -> None:
    """Write the model of the GGUF file `source` as a Hugging Face folder, weights in bf16.

    Peak memory: the bf16 model and one tensor in fp32.
    """
    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = _spec(metadata, tied="output.weight" not in tensors)
    special = _special_tokens(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(_weights(tensors, spec), folder / WEIGHTS)
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / CONFIG, spec_to_hf(spec, "bfloat16"))
    write_json(folder / GENERATION_CONFIG, _special_ids(metadata))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata) | special)
    write_json(folder / "special_tokens_map.json", special)
    # safetensors makes its file private to the user; a cache may be shared.
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def _spec(metadata: Metadata, *, tied: bool) -> ModelSpec:
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    ids = _special_ids(metadata)
    return ModelSpec(
        family="llama",
        layers=metadata["llama.block_count"],
        hidden=hidden,
        intermediate=metadata["llama.feed_forward_length"],
        heads=heads,
        kv_heads=metadata["llama.attention.head_count_kv"],
        head_size=hidden // heads,
        vocabulary=metadata["llama.vocab_size"],
        max_positions=metadata["llama.context_length"],
        norm_eps=_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        tied=tied,
        rope=Rope(theta=_decimal(metadata["llama.rope.freq_base"])),
        eos_ids=(ids["eos_token_id"],),
        bos_id=ids["bos_token_id"],
        pad_id=ids["pad_token_id"],
    )


def _decimal(number: float) -> float:
    """A float32 as the number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _weights(tensors: dict[str, Any], spec: ModelSpec) -> dict[str, Tensor]:
    """Every weight in bf16 by its Hugging Face name, made one at a time."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.layers)
    with torch.device("meta"):
        wanted = hf_views(Decoder(spec))
    weights = {}
    for name in wanted:
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


def _tokenizer(metadata: Metadata) -> "Tokenizer":
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
    control = gguf.TokenType.CONTROL  # what text cannot spell, such as <|im_end|>
    names = (token for token, kind in zip(tokens, types, strict=True) if kind == control)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


def _special_ids(metadata: Metadata) -> dict[str, int]:
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{role}_token_id": metadata[f"tokenizer.ggml.{name}_token_id"]
        for role, name in roles.items()
    }


def _special_tokens(metadata: Metadata) -> dict[str, str]:
    """Role -> text of the tokens that transformers knows by role."""
    ids = _special_ids(metadata) | {"unk_token_id": metadata["tokenizer.ggml.unknown_token_id"]}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {role.removesuffix("_id"): tokens[number] for role, number in ids.items()}


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The generic fast class takes tokenizer.json as it is; GPT2Tokenizer would drop the digits."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
