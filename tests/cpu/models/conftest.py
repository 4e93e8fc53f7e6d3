"""Small random models of each family, as transformers defines them and as we load them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

LINEAR = {"rope_type": "linear", "factor": 2.0}


def heads(count: int, kv: int, **changes: Any) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": kv, **changes}


# name -> (transformers config class, changes): each family, and what differs inside families.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", heads(4, 2, head_dim=32)),
    "qwen3-gqa5": ("Qwen3Config", heads(10, 2, head_dim=16)),
    "qwen3-tied": ("Qwen3Config", heads(4, 4, head_dim=32, tie_word_embeddings=True)),
    "qwen3-yarn": ("Qwen3Config", heads(4, 2, head_dim=32, rope_scaling=YARN)),
    "qwen2": ("Qwen2Config", heads(4, 2)),
    "qwen2-tied": ("Qwen2Config", heads(4, 1, tie_word_embeddings=True)),
    "llama": ("LlamaConfig", heads(4, 2)),
    "llama-smollm2": ("LlamaConfig", heads(9, 3, hidden_size=72, tie_word_embeddings=True)),
    "llama-3": ("LlamaConfig", heads(4, 2, rope_scaling=LLAMA3)),
    "llama-linear": ("LlamaConfig", heads(4, 4, rope_scaling=LINEAR)),
}


def make_reference(variant: str, *, seed: int = 0) -> Any:
    """A transformers model with weights large enough that mistakes show, norms and biases too."""
    name, changes = VARIANTS[variant]
    config = getattr(transformers, name)(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            centre = 1.0 if "norm" in key else 0.0
            weight.copy_(centre + 0.1 * torch.randn_like(weight))
    return model


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reference(variant: str) -> Any:
    return make_reference(variant)


@pytest.fixture
def folder(reference: Any, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
