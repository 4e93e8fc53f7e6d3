"""Models: Qwen3, Qwen2.5 and Llama families, by one decoder; Hugging Face weights in and out."""

from sparrow.models.checkpoint import load, load_tokenizer, locate, random, save, shipped
from sparrow.models.decoder import Attention, Decoder
from sparrow.models.shapes import SHAPES, shape
from sparrow.models.spec import ModelSpec
from sparrow.models.weights import fingerprint, hf_views

__all__ = [
    "SHAPES",
    "Attention",
    "Decoder",
    "ModelSpec",
    "fingerprint",
    "hf_views",
    "load",
    "load_tokenizer",
    "locate",
    "random",
    "save",
    "shape",
    "shipped",
]
