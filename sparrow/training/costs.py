"""The cost of training: floating-point operations as in model utilisation (MFU), and memory.

Operations are the matrix products that any implementation needs, once forward and twice backward:

- 2 for every weight of a product and token. Those weights are q, k, v, out, gate, up and down of
  every layer and the LM head. An embedding is looked up and does not count; tied to the head, the
  one matrix counts once, as the head. Norms and biases do not count.
- Attention, causal: a token multiplies its query with the keys up to its own, and their weights
  with the values, 2 x 2 x heads x head size x L^2 / 2 a layer and sequence of L tokens.

What the backward pass recomputes (activations, logits by chunks) does not count.

Memory is counted from what `Policy` keeps: weights, gradients and both moments in float32, 16 bytes
a parameter, and activations of one micro-batch; copies in 16 bits are made layer by layer. Left
out: kernels' scratch, what the allocator loses between blocks (some percent), and the context of a
GPU. On an H200, Qwen3-1.7B, counted and measured GiB (bench/2026-11-15-train-h200.json): 67.4 and
60.2 (67.0 without torch.compile) for four sequences of 4096 tokens, 29.4 and 27.5 with recompute,
33.6 and 28.9 for one of 32768.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparrow.ops.reference.attention import QUERY_BLOCK
from sparrow.ops.reference.logprob import CHUNK_BYTES as CPU_CHUNK
from sparrow.schema.base import Record
from sparrow.training.policy import CHUNK_BYTES as GPU_CHUNK

if TYPE_CHECKING:
    from sparrow.models.spec import ModelSpec

BACKWARD = 2  # times the forward pass: gradients of inputs and of weights
WIDE = 4  # bytes of a float32
LOGITS_COPIES = 3  # of a chunk in the backward pass: logits, log-probs, gradient
BLOCK_COPIES = 4  # of a block's scores, at once, in reference attention


class TrainerMemory(Record):
    """Bytes of the trainer by kind. `resident` ones are held during rollouts too."""

    weights: int
    gradients: int
    moments: int
    copies: int  # of weights, in the dtype of the products
    activations: int  # of the largest micro-batch
    logits: int  # a chunk of them in the backward pass, and the head's gradient
    reference: int = 0  # weights of the frozen reference model of the KL term

    @property
    def resident(self) -> int:
        """Bytes held while the engine runs."""
        return self.weights + self.moments + self.reference

    @property
    def total(self) -> int:
        """The peak. Gradients grow as activations are freed: never both in full."""
        passing = max(self.gradients, self.activations + self.logits)
        return self.resident + self.copies + passing


def trainer_memory(
    spec: "ModelSpec",
    *,
    tokens: int,
    longest: int,
    item: int,
    recompute: bool,
    gpu: bool,
    lora: int = 0,
) -> TrainerMemory:
    """Predict memory for micro-batches of `tokens` and a longest sequence of `longest`.

    item: bytes of a number in products, 2 or 4. lora: numbers of an adapter that is trained beside
    frozen weights, which are held once more with the adapter in them; 0: the weights are trained.
    """
    size = spec.parameters()
    trained = lora or size
    copied = item * _copied(spec, recompute) if lora or item != WIDE else 0
    return TrainerMemory(
        weights=2 * item * size + WIDE * lora if lora else WIDE * size,
        gradients=WIDE * trained,
        moments=2 * WIDE * trained,
        copies=copied,
        activations=_activations(spec, tokens, longest, item, recompute, gpu),
        logits=_logits(spec, tokens, gpu),
    )


def layer_bytes(spec: "ModelSpec", *, item: int, gpu: bool) -> int:
    """Bytes of activations that a layer keeps per token, its input aside.

    In order: norm, q k v, rotated q, k and v, out of attention, stream, norm, gate and up,
    silu(gate), gated. A GPU in 16 bits runs the flash kernel, which gets keys and values repeated
    for every query head and keeps a log-sum a head; q k v are then kept for the QK-norm alone. The
    reference keeps the rotated k, and v as a part of q k v. Norms of a CPU keep x / rms as well.
    """
    flash, normed = gpu and item < WIDE, spec.qk_norm
    query, key, value = spec.qkv_sizes
    qkv = query + key + value if normed or not flash else 0
    attention = query + (2 * query if flash else key) + query
    scaled = 0 if gpu else 2 * spec.hidden + (query + key) * normed
    numbers = 3 * spec.hidden + qkv + attention + 4 * spec.intermediate + scaled
    scales = 2 + (spec.heads + spec.kv_heads) * normed + spec.heads * flash
    return item * numbers + WIDE * scales


def _activations(
    spec: "ModelSpec", tokens: int, longest: int, item: int, recompute: bool, gpu: bool
) -> int:
    """Inputs of all layers; the inside of one layer (recompute) or of all; gradients."""
    flash = gpu and item < WIDE
    stream = spec.hidden * item
    inside = layer_bytes(spec, item=item, gpu=gpu) * (1 if recompute else spec.layers)
    back = (4 * spec.intermediate + 2 * spec.hidden) * item  # gradients inside an MLP
    ends = 4 * stream  # the last norm's input and output, learnt tokens picked out, their gradient
    scores = 0 if flash else BLOCK_COPIES * QUERY_BLOCK * spec.heads * longest * WIDE
    return tokens * (spec.layers * stream + inside + back + ends) + scores


def _copied(spec: "ModelSpec", recompute: bool) -> int:
    """Number of weights whose copies are held at once: all, or the head's and one layer's."""
    if not recompute:
        return spec.parameters()
    outside = spec.vocabulary * spec.hidden
    embeddings = outside * (1 if spec.tied else 2)
    return outside + (spec.parameters() - embeddings) // spec.layers


def _logits(spec: "ModelSpec", tokens: int, gpu: bool) -> int:
    """A chunk of logits with its copies, the head in float32, and its gradient."""
    row = WIDE * spec.vocabulary
    chunk = min(max(row, GPU_CHUNK if gpu else CPU_CHUNK), tokens * row)
    return LOGITS_COPIES * chunk + 2 * row * spec.hidden


def product_weights(spec: "ModelSpec") -> int:
    """Number of weights that every token is multiplied with: the N of 6 N T."""
    attention = spec.hidden * (sum(spec.qkv_sizes) + spec.qkv_sizes[0])
    layer = attention + 3 * spec.hidden * spec.intermediate
    return spec.layers * layer + spec.vocabulary * spec.hidden


def forward_flops(spec: "ModelSpec", lengths: Sequence[int]) -> float:
    """Operations of a forward pass over sequences: 2 N T and causal attention."""
    attention = 2 * spec.layers * spec.heads * spec.head_size * sum(int(n) ** 2 for n in lengths)
    return float(2 * product_weights(spec) * sum(map(int, lengths)) + attention)


def training_flops(spec: "ModelSpec", lengths: Sequence[int]) -> float:
    """Operations of forward and backward: 6 N T and causal attention three times."""
    return (1 + BACKWARD) * forward_flops(spec, lengths)
