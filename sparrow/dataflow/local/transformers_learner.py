"""A second learner side: plain transformers and torch, on one device, in float32.

`run.learner = "transformers"` takes it in place of `LearnerSide`. It runs one sample at a time, so
that nothing is packed or padded, and has nothing that is optional (sides.py): no distillation, no
sparse attention, no reference model, no KL of updates, no ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.dataflow.local.learner_batch import actor_states, credited_samples, make_batch
from sparrow.dataflow.local.messages import Callbacks, LearnerBatch, NoCallbacks, RolloutBatch
from sparrow.dataflow.local.sides import LearnerProtocol
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models import Decoder, hf_views, provenance
from sparrow.models.weights import with_hf_weights, with_weights
from sparrow.schema.base import Float32Array, Float32Matrix
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import TrainConfig
from sparrow.training.learner import SampleScores
from sparrow.training.objectives.algorithms import Algorithm
from sparrow.training.optimiser import adamw, moments, rate_at
from sparrow.training.packing import pack_samples
from sparrow.training.update import SUMS, UpdateStats, apply_gradients, token_loss


class TransformersLearner(LearnerProtocol):
    """A model of transformers with AdamW.

    model: our decoder of the same files. Its memory is given up: names, shapes and source stay.
    """

    def __init__(self, config: TrainConfig, model: Decoder, algorithm: Algorithm) -> None:
        if model.source is None:
            raise ValueError("run.learner: expected the files of a model, got random weights")
        self.config, self.algorithm, self.device = config, algorithm, model.device
        self.callbacks: Callbacks = NoCallbacks()
        self.decoder = model.to("meta")
        self.model = load_causal_lm(model.source).to(self.device)
        if config.batch.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # without it nothing is recomputed
        self.optimiser = adamw(self.model.parameters(), config.optimiser)
        self.taken = 0

    def header(self) -> str:
        return f"{provenance(self.decoder)}, learner: transformers"

    # A step.

    @torch.no_grad()
    def score(self, rollouts: RolloutBatch, decoding: ResolvedDecoding) -> LearnerBatch:
        limits = {"limit": self.config.rollout.max_tokens}
        limits["vocabulary"] = self.decoder.spec.vocabulary
        samples, scores = credited_samples(rollouts, self.algorithm, **limits), list[SampleScores]()
        for sample, states in zip(samples, actor_states(rollouts), strict=True):
            self.callbacks.phase("old log-probs", len(scores), len(samples))
            scores.append(self._score(sample, states))
        return make_batch(rollouts, samples, scores, self.algorithm)

    def _score(self, sample: TrainSample, states: Float32Matrix | None) -> SampleScores:
        """By learnt token; with acceptance where the actor's hidden states are known."""
        (hidden_RC, stats), alpha = self._forward(sample), None
        if states is not None:
            actor_RC = torch.tensor(states).to(hidden_RC)
            with ops.using("reference"):
                alpha = ops.acceptance(hidden_RC, actor_RC, self.head).cpu().numpy()
        return SampleScores(stats.logprob.cpu().numpy(), stats.entropy.cpu().numpy(), alpha)

    def update(self, batch: LearnerBatch, decoding: ResolvedDecoding) -> list[UpdateStats]:
        if batch.broken:
            return [UpdateStats.without_loss()]
        return [self._step(batch, share) for share in batch.shares(self.config.batch.updates)]

    def _step(self, batch: LearnerBatch, numbers: list[int]) -> UpdateStats:
        """One optimiser step on these samples of a batch."""
        lengths = np.array([batch.samples[number].learnt for number in numbers])
        shares, sums = self.algorithm.aggregate(lengths), np.zeros(len(SUMS))
        for done, (number, share) in enumerate(zip(numbers, shares, strict=True)):
            self.callbacks.phase("update", done, len(numbers))
            sums += self._backward(batch.samples[number], batch.weights[number], float(share))
        config, steps = self.config.optimiser, self.config.run.steps * self.config.batch.updates
        rate, self.taken = rate_at(config, self.taken, steps), self.taken + 1
        figures = dict(zip(SUMS, sums.tolist(), strict=True))
        return apply_gradients(
            *(self.optimiser, self.model.parameters(), self.algorithm, figures),
            tokens=int(lengths.sum()),
            rate=rate,
            clip=config.clip,
        )

    def _backward(self, sample: TrainSample, weight: Float32Array, share: float) -> np.ndarray:
        """Add the gradient of a sample; return its sums."""
        _, stats = self._forward(sample)
        share_R, weight_R = torch.full_like(stats.logprob, share), torch.tensor(weight)
        loss = token_loss(
            *(self.algorithm, [sample], stats.logprob, stats.entropy),
            *(share_R, weight_R.to(self.device)),
        )
        loss.total.backward()
        return loss.sums.cpu().numpy()

    def _forward(self, sample: TrainSample) -> tuple[Tensor, ops.TokenStats]:
        """Hidden states that predict the learnt tokens, and log-prob and entropy of these."""
        pack = pack_samples([sample]).to(self.device)
        found = self.model.base_model(input_ids=pack.ids_T[None], use_cache=False)
        hidden_RC = found.last_hidden_state[0, pack.sources_R]
        with ops.using("reference"):  # which has gradients
            return hidden_RC, ops.token_stats(hidden_RC, self.head, pack.targets_R)

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    # Weights.

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def host_model(self) -> Decoder:
        return with_hf_weights(self.decoder, self.weights())

    def state(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.host_model().named_parameters()}
        own = {"taken": self.taken, "weights": weights, "moments": moments(self.optimiser)}
        return {"learner": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        own = state["learner"]
        stored = hf_views(with_weights(self.decoder, own["weights"]))
        for name, weight in self.weights().items():
            weight.copy_(stored[name])
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": own["moments"]})
        self.taken = own["taken"]


def load_causal_lm(folder: Path) -> Any:
    """A model of transformers in float32; no code of the folder is run."""
    from transformers import AutoModelForCausalLM

    how = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    plain = {"dtype": torch.float32, "attn_implementation": "sdpa", "attention_dropout": 0.0}
    return AutoModelForCausalLM.from_pretrained(folder, **how, **plain)
