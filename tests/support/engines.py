"""Small engines, and what tests ask of them: run to the end, compare bits, compute densely."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow import models, ops
from sparrow.engine import Engine, Output
from sparrow.engine.pool import PAGE
from sparrow.engine.runner import Chunk
from sparrow.models.attention import Packed
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule

VOCABULARY = 211
SPARSE = Schedule.fixed(48)
HIDDEN = OutputOptions(hidden_states=True)
Done = dict[tuple[int, int], Completion]


def tiny(*, seed: int = 3, layers: int = 3, **changes: Any) -> models.Decoder:
    """Layers 0 and 1 are dense under the default rule, so at least one is sparse.

    Large enough weights that logits have a spread, and head size 32 for numba's decode attention.
    """
    small = {"hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_size": 32}
    sizes = {**small, "vocabulary": VOCABULARY, "max_positions": 4096, **changes}
    model = models.random("qwen3-0.6b", layers=layers, seed=seed, **sizes)
    with torch.no_grad():
        for name, view in models.hf_views(model).items():
            if "norm" not in name:
                view.mul_(8)
    return model


def engine_of(model: models.Decoder, *, pages: int = 160, **settings: Any) -> Engine:
    """An engine with this many pages; a context of 512 tokens unless told otherwise."""
    kv_bytes = pages * page_bytes(model, settings.get("rule", Rule()))
    return Engine(model, **{"max_context": 512, "kv_bytes": kv_bytes, **settings})


def page_bytes(model: models.Decoder, rule: Rule | None) -> int:
    spec, sizes = model.spec, {"head_size": model.spec.head_size, "dtype": model.dtype}
    fields = (*ops.kv_fields(PAGE, **sizes), *(rule.fields(page=PAGE, **sizes) if rule else ()))
    return ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)


def alone(model: models.Decoder, ids: list[int], own: SamplingParams, **how: Any) -> Completion:
    """The completion of one prompt by an engine that nobody else uses."""
    (completion,) = engine_of(model).generate([ids], own, **how)
    return completion


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 11, "ignore_eos": True, **changes})


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(VOCABULARY, size=length).tolist()


def run(engine: Engine, *, most: int = 2000, outputs: Iterable[Output] = ()) -> Done:
    """Steps until idle; integrity after each, every sample ends once and its tokens all came."""
    done: Done = {}
    came: dict[tuple[int, int], list[int]] = {}
    _note(outputs, done, came)
    for _ in range(most):
        if engine.idle:
            engine.check_integrity()
            return done
        _note(engine.step(), done, came)
        engine.check_integrity()
    raise AssertionError(f"not idle after {most} steps")


def _note(outputs: Iterable[Output], done: Done, came: dict[tuple[int, int], list[int]]) -> None:
    for output in outputs:
        key = output.request, output.sample
        assert key not in done, f"{key} ended before"
        came.setdefault(key, []).extend(output.tokens)
        if output.completion is not None:
            done[key] = output.completion
            tail = came[key]
            if not output.completion.restarts and tail:
                assert output.completion.token_ids.tolist()[-len(tail) :] == tail


def steps(engine: Engine, count: int) -> list[Output]:
    return [output for _ in range(count) for output in engine.step()]


def step_into(outputs: list[Output], engine: Engine) -> None:
    """Step until idle or a failure; what came before it is in `outputs`."""
    while not engine.idle:
        outputs += engine.step()


def count_prefill(engine: Engine) -> list[list[Chunk]]:
    """Chunks of every pass over prompts from now on; the list grows."""
    seen: list[list[Chunk]] = []
    inner = engine.runner.prefill

    def prefill(chunks: Sequence[Chunk]) -> None:
        seen.append(list(chunks))
        inner(chunks)

    engine.runner.prefill = prefill
    return seen


def tokens_of(passes: Iterable[Iterable[Chunk]]) -> int:
    return sum(chunk.stop - chunk.start for chunks in passes for chunk in chunks)


def same_bits(left: Completion | list[Completion], right: Completion | list[Completion]) -> None:
    """Everything a token carries, bit for bit; of one completion, or of as many."""
    ours, theirs = ([side] if isinstance(side, Completion) else side for side in (left, right))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("token_ids", "logprobs", "entropies", "kept"):
            mine_, other_ = getattr(mine, name), getattr(other, name)
            assert np.array_equal(mine_, other_), f"{name} differ: {mine_} and {other_}"
        assert mine.finish_reason == other.finish_reason


def dense_hidden(model: models.Decoder, completion: Completion, lora: Any = None) -> Tensor:
    """The hidden states that the answer's tokens come from, by one dense pass over everything."""
    ids = torch.tensor([*completion.prompt_ids.tolist(), *completion.token_ids.tolist()])
    with torch.no_grad():
        bounds = torch.tensor([0, len(ids)])
        hidden = model(ids, torch.arange(len(ids)), Packed(bounds=bounds), lora)
    return hidden[len(completion.prompt_ids) - 1 : -1]


class OwnKV:
    """Causal attention in plain torch over keys and values that stay, whichever weights made them.

    A pass adds its tokens behind those of earlier passes.
    """

    def __init__(self) -> None:
        self.length = 0
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_THD: Tensor, *new: Tensor, scale: float) -> Tensor:
        old = self._kv.get(layer, [part[:0] for part in new])
        k_SGD, v_SGD = (torch.cat(parts) for parts in zip(old, new, strict=True))
        self._kv[layer] = k_SGD, v_SGD
        self.length = len(k_SGD)
        of_head = torch.arange(q_THD.shape[1]) // (q_THD.shape[1] // k_SGD.shape[1])
        scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SGD[:, of_head]) * scale
        seen_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool).tril(len(k_SGD) - len(q_THD))
        weights_HTS = scores_HTS.masked_fill(~seen_TS, -torch.inf).softmax(2)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SGD[:, of_head])


def logp_by_hand(
    decoders: Sequence[models.Decoder], completion: Completion, lora: Any = None
) -> Tensor:
    """Dense log-probs [tokens, V] where each token is drawn by a decoder of its own.

    A decoder reads the keys and values of those before it; only at the lengths that the completion
    says it computes all of them itself.
    """
    ids = torch.tensor([*completion.prompt_ids.tolist(), *completion.token_ids.tolist()])
    kv, rows = OwnKV(), []
    for length, decoder in enumerate(decoders, len(completion.prompt_ids)):
        if length - 1 in completion.recomputed:
            kv = OwnKV()
        new = torch.arange(kv.length, length)
        with torch.no_grad():
            rows.append(logp(decoder, decoder(ids[new], new, kv, lora)[-1:]))
    return torch.cat(rows)


def recorded_hidden(completion: Completion) -> Tensor:
    assert completion.hidden is not None
    return torch.tensor(completion.hidden)


def logp(model: models.Decoder, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    return (hidden @ model.head.detach().T / temperature).log_softmax(1)


def changed(model: models.Decoder, seed: int = 5, size: float = 0.2) -> dict[str, Tensor]:
    """Other weights for the same model, by Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: view + size * view.std() * torch.randn(view.shape, generator=generator)
        if "norm" not in name
        else view.clone()
        for name, view in models.hf_views(model).items()
    }


def weights_of(model: models.Decoder) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in models.hf_views(model).items()}


def with_weights(weights: dict[str, Tensor]) -> models.Decoder:
    """A new model of the tiny kind with these weights."""
    model = tiny()
    with torch.no_grad():
        for name, view in models.hf_views(model).items():
            view.copy_(weights[name])
    return model
