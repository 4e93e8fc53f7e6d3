"""GGUF in, Hugging Face folder out.

A GGUF file holds a whole model (weights, shape, vocabulary, chat template) in llama.cpp's terms.
Everything downstream reads Hugging Face folders, so the translation happens once, here. What the
file says is read and what it fails to say is an error: a guess would give a model that speaks, but
is not the one that was asked for.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from sparrow.models.spec import spec_from_hf

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

Json = dict[str, Any]
Shape = tuple[int, ...]
Value = TypeVar("Value", str, int, float, list)

# Role of a special token in Hugging Face's names -> in GGUF's.
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def convert(source: Path, folder: Path) -> None:
    """Write the Llama model of the GGUF file `source` as a Hugging Face folder, weights in bf16.

    `folder` is made; nothing is written before all of `source` has been read and checked. Where
    `source` is damaged, incomplete or not a plain Llama, raises a ValueError that names the file
    and the key or tensor. Peak memory: the bf16 model and one tensor in fp32.
    """
    from safetensors.torch import save_file

    model = _Gguf(source)
    config, special = _config(model), _special_tokens(model)
    spec_from_hf(config, str(source))  # sizes and numbers are sensible, or it raises
    tokenizer = _tokenizer(model)
    documents = {
        "config.json": config,
        "generation_config.json": _special_ids(model),
        "tokenizer_config.json": _tokenizer_config(model) | special,
        "special_tokens_map.json": special,
    }
    weights = dict(_weights(model, config))

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in documents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    # safetensors makes its file private to the user; a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


class _Gguf:
    """The metadata and the tensors of one GGUF file; every complaint names that file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise self.error(f"not a whole GGUF file ({error})") from error
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {problem}")

    def get(self, key: str, kind: type[Value]) -> Value:
        """The metadata value of `key`, which must be there and be a `kind`."""
        if key not in self.fields:
            raise self.error(f"lacks the metadata key {key}")
        value = self.fields[key].contents()
        if not isinstance(value, kind):
            raise self.error(f"{key} is {value!r:.60}, expected {kind.__name__}")
        return value

    def texts(self, key: str) -> list[str]:
        """The metadata value of `key`, which must be a list of texts."""
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.error(f"{key} is {values!r:.60}, expected texts")
        return values

    def decimal(self, key: str) -> float:
        """A float32 as the number that was meant: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.get(key, float))))

    def require(self, key: str, supported: object) -> None:
        """Refuse a file that asks for something else than the one thing that is done here."""
        found = self.fields[key].contents() if key in self.fields else None
        if found != supported:
            raise self.error(f"{key} is {found!r}, only {supported!r} is supported")


def _config(model: _Gguf) -> Json:
    """config.json, in the spelling that transformers 4 and 5 both read."""
    model.require("general.architecture", "llama")
    for key in model.fields:
        if key.startswith("llama.rope.scal"):
            raise model.error(f"{key}: scaled rope is not supported")
    hidden = model.get("llama.embedding_length", int)
    heads = model.get("llama.attention.head_count", int)
    if heads < 1:
        raise model.error(f"llama.attention.head_count is {heads}, expected 1 or more")
    model.require("llama.rope.dimension_count", hidden // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "vocab_size": model.get("llama.vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": model.get("llama.feed_forward_length", int),
        "num_hidden_layers": model.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("llama.attention.head_count_kv", int),
        "head_dim": hidden // heads,
        "max_position_embeddings": model.get("llama.context_length", int),
        "rms_norm_eps": model.decimal("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": model.decimal("llama.rope.freq_base"),
        "rope_scaling": None,
        **_special_ids(model),
    }


def _special_ids(model: _Gguf) -> dict[str, int]:
    return {
        f"{role}_token_id": model.get(f"tokenizer.ggml.{_ROLES[role]}_token_id", int)
        for role in ("bos", "eos", "pad")
    }


def _parameters(config: Json) -> dict[str, tuple[str, Shape]]:
    """GGUF name -> (Hugging Face name, shape) of every tensor that such a model has."""
    vocab, hidden, mlp = (config[f"{k}_size"] for k in ("vocab", "hidden", "intermediate"))
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    names: dict[str, tuple[str, Shape]] = {
        "token_embd": ("model.embed_tokens", (vocab, hidden)),
        "output_norm": ("model.norm", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output"] = ("lm_head", (vocab, hidden))
    layer: dict[str, tuple[str, Shape]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (mlp, hidden)),
        "ffn_up": ("mlp.up_proj", (mlp, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, mlp)),
    }
    for i in range(config["num_hidden_layers"]):
        for name, (target, shape) in layer.items():
            names[f"blk.{i}.{name}"] = (f"model.layers.{i}.{target}", shape)
    return {f"{name}.weight": (f"{to}.weight", shape) for name, (to, shape) in names.items()}


def _weights(model: _Gguf, config: Json) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every parameter in bf16, one at a time, so that only one is ever held in fp32."""
    import torch

    parameters = _parameters(config)
    if unknown := sorted(model.tensors.keys() - parameters):
        raise model.error(f"has tensors that a plain Llama has not: {', '.join(unknown)}")
    for name, (target, shape) in parameters.items():
        weight = _dequantised(model, name, shape)
        if name.endswith("attn_q.weight"):
            weight = _halves(weight, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            weight = _halves(weight, config["num_key_value_heads"])
        yield target, torch.tensor(weight, dtype=torch.bfloat16)


def _dequantised(model: _Gguf, name: str, shape: Shape) -> NDArray[np.float32]:
    if name not in model.tensors:
        raise model.error(f"lacks the tensor {name}")
    tensor = model.tensors[name]
    found = tuple(reversed(tensor.shape.tolist()))
    if found != shape:
        raise model.error(f"{name} has shape {found}, expected {shape}")
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise model.error(f"{name}: {error}") from error


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection from llama.cpp's rope order to Hugging Face's.

    Rope turns pairs of channels. llama.cpp keeps the two of a pair next to each other, transformers
    half a head apart; llama.cpp's converter reorders the rows of each head, and this undoes it.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(model: _Gguf) -> "Tokenizer":
    """Byte-level BPE with SmolLM's split of text into words: each digit alone, then GPT-2's rule.

    The vocabulary lacks a few bytes that text rarely holds (six control characters, the leading
    bytes of unassigned Unicode planes); those encode to nothing, as in the original tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model.require("tokenizer.ggml.model", "gpt2")
    model.require("tokenizer.ggml.pre", "smollm")
    model.require("tokenizer.ggml.add_bos_token", False)
    model.require("tokenizer.ggml.add_space_prefix", False)
    vocabulary = _vocabulary(model)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(model, vocabulary)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = (AddedToken(token, normalized=False) for token in _control_tokens(model))
    tokenizer.add_special_tokens(list(control))
    return tokenizer


def _vocabulary(model: _Gguf) -> dict[str, int]:
    tokens = model.texts("tokenizer.ggml.tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    size = model.get("llama.vocab_size", int)
    if not len(vocabulary) == len(tokens) == size:
        raise model.error(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, {len(vocabulary)} of them different, "
            f"but llama.vocab_size is {size}"
        )
    return vocabulary


def _merges(model: _Gguf, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in model.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise model.error(f"tokenizer.ggml.merges: {merge!r} is not about two known tokens")
        merges.append((left, right))
    return merges


def _control_tokens(model: _Gguf) -> list[str]:
    """The tokens that text cannot spell, such as <|im_end|>, in the order of their ids."""
    tokens = model.texts("tokenizer.ggml.tokens")
    types = model.get("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise model.error(f"tokenizer.ggml.token_type is for {len(types)} of {len(tokens)} tokens")
    if other := set(types) - {gguf.TokenType.NORMAL, gguf.TokenType.CONTROL}:
        raise model.error(f"tokenizer.ggml.token_type: {sorted(other)} not supported")
    control = gguf.TokenType.CONTROL
    return [token for token, kind in zip(tokens, types, strict=True) if kind == control]


def _special_tokens(model: _Gguf) -> dict[str, str]:
    """Role -> text of the tokens that transformers knows by role."""
    tokens = model.texts("tokenizer.ggml.tokens")
    special = {}
    for role, key in _ROLES.items():
        token_id = model.get(f"tokenizer.ggml.{key}_token_id", int)
        if not 0 <= token_id < len(tokens):
            raise model.error(f"tokenizer.ggml.{key}_token_id is {token_id} of {len(tokens)}")
        special[f"{role}_token"] = tokens[token_id]
    return special


def _tokenizer_config(model: _Gguf) -> Json:
    """The generic fast class takes tokenizer.json as it is; GPT2Tokenizer would drop the digits."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.get("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "chat_template": model.get("tokenizer.chat_template", str),
    }
