"""Runs the model over the page cache: prompts in chunks, first draws, and decode steps.

A decode step reads and moves on the device's own `Rows`, so its only input is which rows take
part, and on a GPU it is captured once per shape and replayed. Results are copied to host memory
behind the step and read later (`Delivery.read`), so nothing here waits for the device.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.pool import Rows, batch_bucket
from sparrow.engine.requests import ACTOR, Request, Sample
from sparrow.engine.speculation import DraftRows
from sparrow.models import Decoder
from sparrow.models.attention import PagedDecode, PagedPrefill, PagedVerify
from sparrow.models.lora import AdapterBank
from sparrow.schema.sampling import Acceptance
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule

# Captured page-table widths: attention is launched for this many pages, so a short context does
# not pay for the longest one.
PAGES = (32, 128, 512, 1024, 1536, 2048)
INT8_ROWS = 64  # with more, products of 8-bit weights have no kernel
RULE_OPS = frozenset({"select_pages"})
GRAPH_OPS = RULE_OPS | {"attend_decode", "write_pages", "sample", "step_inputs", "step_outputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens start to stop of a prompt (or of a sample that is recomputed)."""

    owner: Request | Sample
    start: int
    stop: int
    pages: tuple[int, ...]  # of the tokens 0 to stop

    @property
    def last(self) -> bool:
        return self.stop == len(self.owner.ids)


class StepKind(NamedTuple):
    """What a captured step depends on beside the contents of tensors."""

    batch: int
    pages: int  # width of the page tables
    sparse: bool
    truncated: bool
    adapted: bool
    merged: bool  # whether all rows use the actor: it runs with the merged weights
    int8: bool  # or are drafts with weights in 8 bits
    hidden: bool  # whether anybody wants hidden states
    logits: bool  # or logits
    drafts: bool  # whether draws of rows that speculate are recorded as drafts
    summaries: bool  # whether tokens of this step finish pages: not those of drafts
    ahead: int  # further drafts that may read the pages which this step selects
    reuse: bool  # whether it reads those of an earlier step


class VerifyKind(NamedTuple):
    """The same of a verification."""

    batch: int
    pages: int
    queries: int  # of each row
    rules: frozenset[Acceptance]
    truncated: bool
    adapted: bool
    hidden: bool
    logits: bool


class StepOutput(NamedTuple):
    """The draws as int32 [4, B] (floats by their bits); hidden [B, C] and logits [B, V] if wanted.

    Of a verification the draws are those of `ops.verify_outputs`, the rest is by query. A captured
    step keeps what it returns, so the large ones are returned only on demand.
    """

    draws: Tensor
    hidden_BC: Tensor | None
    logits_BV: Tensor | None


class Delivery:
    """Sampled tokens being copied to the host, with the samples they belong to (None: nobody's)."""

    def __init__(self, samples: Sequence[Sample | None], output: StepOutput, version: int) -> None:
        self.samples = list(samples)
        self.version = version
        self._draws = _to_host(output.draws)  # whole, spare rows too: one plain copy
        self._hidden_BC: Tensor | None = None
        self._top: tuple[Tensor, Tensor] | None = None
        self._take_extras(output)
        self._ready = None
        if output.draws.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def _take_extras(self, output: StepOutput) -> None:
        """Start to copy the hidden states and the most likely tokens that requests ask for."""
        _, hidden_BC, logits_BV = output
        if hidden_BC is None and logits_BV is None:
            return
        owners = self._owners()
        options = [sample.request.options for sample in owners if sample is not None]
        if hidden_BC is not None and any(option.hidden_states for option in options):
            self._hidden_BC = _to_host(hidden_BC[: len(owners)].float())
        most = max((option.top_logprobs for option in options), default=0)
        if logits_BV is not None and most:
            scale_B = [(sample and sample.request.params.temperature) or 1.0 for sample in owners]
            values_BK, ids_BK = _top_logprobs(logits_BV[: len(owners)], scale_B, most)
            self._top = (_to_host(ids_BK.int()), _to_host(values_BK))

    def _owners(self) -> list[Sample | None]:
        """The sample of each row of hidden states and logits."""
        return self.samples

    def _arrived(self) -> npt.NDArray[np.int32]:
        """Wait for the copy."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._draws.numpy()

    def read(self) -> list[tuple[Sample, list[int]]]:
        """Add the tokens to samples that still run; return those samples with their new tokens."""
        packed = self._arrived()
        logprobs, entropies = packed[1:3].view(np.float32)
        columns = packed[0], logprobs, entropies + 0.0, packed[3]  # -0.0 reads badly
        draws = zip(*(column.tolist() for column in columns), strict=True)
        due: list[tuple[Sample, list[int]]] = []
        # A step has spare rows at its end.
        for index, (sample, draw) in enumerate(zip(self.samples, draws, strict=False)):
            if sample is None or sample.finish is not None:
                continue
            token, logprob, entropy, ok = draw
            if not ok:
                sample.fail()
                due.append((sample, []))
                continue
            sample.take(token, logprob, entropy, self.version)
            self._hand_extras(index, sample)
            due.append((sample, [token]))
        return due

    def _hand_extras(self, index: int, sample: Sample) -> None:
        """Add the hidden state and the most likely tokens of a draw to its sample."""
        options = sample.request.options
        if options.hidden_states and self._hidden_BC is not None:
            sample.hidden.append(self._hidden_BC[index].numpy().copy())
        if options.top_logprobs and self._top is not None:
            ids_BK, values_BK = (part[index, : options.top_logprobs].numpy() for part in self._top)
            sample.top.append((ids_BK.copy(), values_BK.copy()))


class VerifyDelivery(Delivery):
    """The tokens of a round: accepted drafts, and the one that the verification adds."""

    def __init__(self, samples: Sequence[Sample], output: StepOutput, version: int) -> None:
        self.drafts = [sample.drafts for sample in samples]
        self.queries = output.draws.shape[1] // 4
        super().__init__(samples, output, version)

    def _owners(self) -> list[Sample | None]:
        return [sample for sample in self.samples for _ in range(self.queries)]

    def read(self) -> list[tuple[Sample, list[int]]]:
        packed = self._arrived()
        tokens, logprobs, entropies, ok = np.split(packed[:, :-1], 4, axis=1)
        parts = tokens, logprobs.view(np.float32), entropies.view(np.float32) + 0.0, ok
        due: list[tuple[Sample, list[int]]] = []
        for row, (sample, drafts) in enumerate(zip(self.samples, self.drafts, strict=True)):
            if sample is None or sample.finish is not None:
                continue
            emitted, before = int(packed[row, -1]), len(sample.tokens)
            columns = (part[row, :emitted].tolist() for part in parts)
            for query, (token, logprob, entropy, fine) in enumerate(zip(*columns, strict=True)):
                if sample.finish is None and fine:
                    sample.take(token, logprob, entropy, self.version)
                    self._hand_extras(row * self.queries + query, sample)
                elif sample.finish is None:
                    sample.fail()
            taken = sample.tokens[before:]
            sample.take_round(drafts, emitted, len(taken))
            due.append((sample, taken))
        return due


Step = Callable[[Any, Tensor], StepOutput]

CAPTURING = threading.Lock()  # torch captures on one stream, with one random generator


@dataclass(slots=True)
class Captured:
    """A graph, its input and output, and the rows that the input names now."""

    graph: torch.cuda.CUDAGraph
    input_B: Tensor
    output: StepOutput
    rows: list[int]


class Graphs:
    """CUDA graphs of decode steps by kind, captured on first use and replayed.

    A graph has one shape: a batch bucket, a width of page tables, and which parts of the step take
    part. Everything it reads and writes has a fixed address; its one input is copied in before the
    replay. Capturing runs the step on spare rows alone, so no sequence notices. Engines that step
    in threads of one process capture one at a time, and run on one stream: their products count
    arrivals in the same memory. It keeps no reference to its runner: memory is freed as soon as an
    engine sleeps.
    """

    def __init__(self, device: torch.device, spare: int) -> None:
        self.device, self.spare = device, spare
        self._captured: dict[StepKind | VerifyKind, Captured] = {}
        self._memory: Any = None

    def run(
        self,
        kind: StepKind | VerifyKind,
        rows: list[int],
        upload: Callable[[list[int]], Tensor],
        step: Step,
    ) -> StepOutput:
        """Replay the step of this kind for these rows; capture it first if it is new.

        Rows are uploaded only where they differ from the last time. What comes back is overwritten
        by the next replay.
        """
        if kind not in self._captured:
            with CAPTURING:
                self._captured[kind] = self._capture(kind, step)
        captured = self._captured[kind]
        if captured.rows != rows:
            captured.input_B.copy_(upload(rows))
            captured.rows = rows
        captured.graph.replay()
        return captured.output

    def _capture(self, kind: StepKind | VerifyKind, step: Step) -> Captured:
        input_B = torch.full((kind.batch,), self.spare, dtype=torch.int64, device=self.device)
        step(kind, input_B)  # compiles kernels, which a capture must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = step(kind, input_B)
        self._memory = graph.pool()
        return Captured(graph, input_B, output, [self.spare] * kind.batch)


def without_kernel(model: Decoder, rule: Rule | None) -> set[str]:
    """Ops of a decode step that have no kernel for this model: no graph can hold those."""
    fast = ops.versions(model.device.type, model.dtype, model.spec.head_size)
    needed = GRAPH_OPS if rule is not None else GRAPH_OPS - RULE_OPS
    return set(needed - fast.keys())


def pages_bucket(pages: int, most: int) -> int:
    return min(next((width for width in PAGES if width >= pages), most), most)


class Runner:
    """The model, its cache and its rows on one device."""

    def __init__(
        self,
        model: Decoder,
        cache: ops.PageCache,
        rows: Rows,
        *,
        rule: Rule | None,
        budgets: BudgetTable,
        adapters: AdapterBank,
        merged: Decoder | None,
        int8: Decoder | None,
        drafts: DraftRows | None,
        least_batch: int,
        graphs: bool,
    ) -> None:
        self.model, self.cache, self.rows = model, cache, rows
        self.merged = merged  # the model with the actor's adapter in its weights
        self.int8 = int8  # that model, or the model, in 8 bits
        self.draft_rows = drafts
        self.rule, self.budgets, self.adapters = rule, budgets, adapters
        self.least_batch = least_batch
        self.graphs = Graphs(model.device, rows.spare) if graphs else None

    @property
    def drafts(self) -> DraftRows:
        assert self.draft_rows is not None, "a sample drafts in an engine without room for drafts"
        return self.draft_rows

    def _decoder(self, merged: bool, int8: bool = False) -> Decoder:
        if int8:
            assert self.int8 is not None, "a request drafts in 8 bits in an engine without these"
            return self.int8
        if not merged:
            return self.model
        assert self.merged is not None, "a request uses the actor in an engine without one"
        return self.merged

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute keys and values of these chunks; a prompt's last one also gives its logits."""
        page, width = self.cache.page, max(len(chunk.pages) for chunk in chunks)
        table_BM = np.full((len(chunks), width), -1)
        parts = []  # id, position, slot and adapter of each token
        for table_M, chunk in zip(table_BM, chunks, strict=True):
            table_M[: len(chunk.pages)] = chunk.pages
            ids = chunk.owner.ids[chunk.start : chunk.stop]
            position = np.arange(chunk.start, chunk.stop)
            slot = table_M[position // page] * page + position % page
            adapter = np.full_like(position, chunk.owner.request.policy_slot.slot)
            parts.append(np.stack([ids, position, slot, adapter]))
        tokens_4T = np.concatenate(parts, axis=1)
        ids_T, positions_T, slots_T, adapter_T = self.rows.upload(tokens_4T).unbind(0)
        bounds = np.cumsum([0, *(chunk.stop - chunk.start for chunk in chunks)])
        attention = PagedPrefill(
            cache=self.cache,
            table_BM=self.rows.upload(table_BM),
            lengths_B=self.rows.upload([chunk.stop for chunk in chunks]),
            bounds=self.rows.upload(bounds),
            slots_T=slots_T,
            rule=self.rule,
        )
        merged = all(chunk.owner.request.policy_adapter == ACTOR for chunk in chunks)
        adapted = not merged and tokens_4T[3].any()
        lora = self.adapters.rows(adapter_T) if adapted else None
        hidden_TC = self._decoder(merged)(ids_T, positions_T, attention, lora)
        for chunk, end in zip(chunks, bounds[1:].tolist(), strict=True):
            if chunk.last and isinstance(chunk.owner, Request):
                chunk.owner.hidden_C = hidden_TC[end - 1].clone()
                chunk.owner.logits_V = self.model.logits(hidden_TC[end - 1 : end])[0]

    @torch.inference_mode()
    def first_draws(self, samples: Sequence[Sample]) -> StepOutput:
        """The first token of samples that have just entered, from their prompts' logits."""
        rows, at_B = self.rows, self.rows.upload([_row(sample) for sample in samples])
        logits_BV = torch.stack([_computed(s.request.logits_V) for s in samples])
        hidden_BC = torch.stack([_computed(s.request.hidden_C) for s in samples])
        step = ops.step_inputs(at_B, rows.state, page=self.cache.page, width=rows.table_RM.shape[1])
        truncated = any(sample.truncated for sample in samples)
        draws = rows.sample(logits_BV, at_B, step, truncated=truncated)
        return StepOutput(
            hidden_BC=hidden_BC,
            logits_BV=logits_BV,
            draws=ops.step_outputs(at_B, draws, rows.state, advance=False),
        )

    @torch.inference_mode()
    def decode(
        self, samples: Sequence[Sample], *, ahead: int = 0, reuse: bool = False
    ) -> StepOutput:
        """One more token for each of these resident samples.

        Drafts of exact decoding may read the pages that an earlier one selected (reuse), if that
        one was told how many would follow it (ahead).

        Weights change between steps only, and what changes them is followed by this step's own
        inputs: they are settled when the products run. So are the adapters of rows, which are
        followed by the embedding.
        """
        requests = {sample.request for sample in samples}
        speculative = [request.speculative is not None for request in requests]
        merged = all(request.adapter == ACTOR for request in requests)
        adapted = any(request.adapter_slot.slot for request in requests) and not merged
        wanted = (r.speculative is not None and r.speculative.weights == "int8" for r in requests)
        int8 = len(samples) <= INT8_ROWS and not adapted and all(wanted)
        kind = StepKind(
            **self._common(samples, requests, self.least_batch, verify=False),
            adapted=adapted,
            merged=merged and not int8,
            int8=int8,
            sparse=any(request.schedule is not None for request in requests),
            drafts=any(speculative),
            summaries=not all(speculative),
            ahead=ahead,
            reuse=reuse,
        )
        return self._launch(kind, samples, self._step)

    @torch.inference_mode()
    def verify(self, samples: Sequence[Sample]) -> StepOutput:
        """Verify the drafts of these resident samples; each gets one more token."""
        requests = {sample.request for sample in samples}
        speculative = [r.speculative for r in requests if r.speculative is not None]
        queries = 1 + max(sample.drafts for sample in samples)
        if self.model.device.type == "cuda":  # one shape, whatever the last rounds draft
            queries = 1 + max(params.draft_tokens for params in speculative)
        kind = VerifyKind(
            **self._common(samples, requests, -(-self.least_batch // queries), verify=True),
            adapted=any(request.policy_slot.slot for request in requests),
            queries=queries,
            rules=frozenset(params.acceptance for params in speculative),
        )
        return self._launch(kind, samples, self._verify)

    def _launch(
        self, kind: StepKind | VerifyKind, samples: Sequence[Sample], step: Step
    ) -> StepOutput:
        rows = [_row(sample) for sample in samples]
        rows += [self.rows.spare] * (kind.batch - len(samples))
        with ops.settled_weights():
            if self.graphs is None:
                return step(kind, self.rows.upload(rows))
            return self.graphs.run(kind, rows, self.rows.upload, step)

    def _common(
        self, samples: Sequence[Sample], requests: set[Request], least: int, *, verify: bool
    ) -> dict[str, Any]:
        """What decode steps and verifications both depend on; drafts return nothing."""
        pages = max(len(sample.context.pages) for sample in samples)
        batch = max(len(samples), least)
        if self.model.device.type == "cuda":  # eager steps too: equal shapes give equal bits
            batch, pages = batch_bucket(batch), pages_bucket(pages, self.rows.table_RM.shape[1])
        cutting = any(request.cuts for request in requests)
        options = [r.options for r in requests if verify or r.speculative is None]
        return {
            "batch": batch,
            "pages": pages,
            "truncated": cutting and any(sample.truncated for sample in samples),
            "hidden": any(option.hidden_states for option in options),
            "logits": any(option.top_logprobs for option in options),
        }

    def _step(self, kind: StepKind, at_B: Tensor) -> StepOutput:
        """The whole step as device work: no value of it depends on the host."""
        rows, state = self.rows, self.rows.state
        step = ops.step_inputs(at_B, state, page=self.cache.page, width=kind.pages)
        budgets = (
            self.budgets.lookup(rows.schedule_R[at_B], step.lengths_B) if kind.sparse else None
        )
        held: dict[str, Any] = {}
        if kind.ahead or kind.reuse:
            ahead_B = kind.ahead * (step.lengths_B > 0)
            lengths = {"held_lengths_B": step.lengths_B + ahead_B, "reuse": kind.reuse}
            held = {"held": self.drafts.held, **lengths}
        attention = PagedDecode(
            cache=self.cache,
            table_BM=step.table_BM,
            lengths_B=step.lengths_B,
            slots_B=step.slots_B,
            rule=self.rule,
            budgets=budgets,
            rows_B=at_B,
            summary_slots_B=self._summary_slots(kind, at_B, step.slots_B),
            **held,
        )
        lora = self.adapters.rows(rows.adapter_R[at_B]) if kind.adapted else None
        decoder = self._decoder(kind.merged, kind.int8)
        hidden_BC = decoder(step.ids_B, step.positions_B, attention, lora)
        logits_BV = decoder.logits(hidden_BC)
        draws = rows.sample(logits_BV, at_B, step, truncated=kind.truncated)
        if kind.drafts:
            self.drafts.record(at_B, step.ids_B, draws, logits_BV)
        return StepOutput(
            draws=ops.step_outputs(at_B, draws, state, advance=True),
            hidden_BC=hidden_BC if kind.hidden else None,
            logits_BV=logits_BV if kind.logits else None,
        )

    def _summary_slots(self, kind: StepKind, at_B: Tensor, slots_B: Tensor) -> Tensor | None:
        """The slots that finish pages, where not all do: drafts are not verified yet."""
        if not kind.drafts:
            return None
        if not kind.summaries:
            return slots_B[:0]
        return torch.where(self.rows.acceptance_R[at_B] > 0, -1, slots_B)

    def _verify(self, kind: VerifyKind, at_B: Tensor) -> StepOutput:
        """A verification as device work; rows go on behind what was accepted."""
        rows, state, drafts = self.rows, self.rows.state, self.drafts.state
        sizes = {"page": self.cache.page, "width": kind.pages, "queries": kind.queries}
        step = ops.verify_inputs(at_B, state, drafts, **sizes)
        attention = PagedVerify(
            cache=self.cache,
            table_BM=step.table_BM,
            lengths_T=step.lengths_B,
            slots_T=step.slots_B,
            rule=self.rule,
        )
        at_T = at_B.repeat_interleave(kind.queries)
        lora = self.adapters.rows(rows.policy_adapter_R[at_T]) if kind.adapted else None
        hidden_TC = self.model(step.ids_B, step.positions_B, attention, lora)
        logits_TV = self.model.logits(hidden_TC)
        verdict = self.drafts.verify(
            logits_TV, at_B, step, rules=kind.rules, truncated=kind.truncated
        )
        return StepOutput(
            draws=ops.verify_outputs(at_B, verdict, state, drafts),
            hidden_BC=hidden_TC if kind.hidden else None,
            logits_BV=logits_TV if kind.logits else None,
        )


def _row(sample: Sample) -> int:
    assert sample.row is not None
    return sample.row


def _computed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a sample starts before its prompt is computed"
    return tensor


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to host memory; complete when the stream has come this far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _top_logprobs(logits_BV: Tensor, temperature_B: list[float], k: int) -> tuple[Tensor, Tensor]:
    scale_B = torch.tensor(temperature_B, dtype=torch.float32)
    if logits_BV.is_cuda:
        scale_B = scale_B.pin_memory().to(logits_BV.device, non_blocking=True)
    logp_BV = (logits_BV / scale_B[:, None]).log_softmax(1)
    return logp_BV.topk(k, dim=1)
