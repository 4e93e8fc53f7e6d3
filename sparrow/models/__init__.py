"""Models: Qwen3, Qwen2.5 and Llama families, by one decoder; Hugging Face weights in and out."""

from sparrow.models.checkpoint import load, random, save
from sparrow.models.decoder import Attention, Decoder
from sparrow.models.sources import locate, provenance, shipped
from sparrow.models.spec import SHAPES, ModelSpec, shape
from sparrow.models.tokenizer import load_tokenizer, model_identity, tokenizer_digest
from sparrow.models.weights import fingerprint, hf_views
