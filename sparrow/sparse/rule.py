"""A rule: a flow with the pages it always keeps and the layers that stay dense.

The flow is the formula, the rest is configuration; a schedule names both, and says how many tokens
to keep. Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows import interpret
from sparrow.sparse.flows.flow import Flow, Program, check_weights, trace
from sparrow.sparse.flows.interpret import ScoreContext
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.loading import FORCE

if TYPE_CHECKING:
    from sparrow.sparse.compile.launch import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Selects the pages that a token attends to, by summaries stored with finished pages.

    A rule has no state between calls; everything is in the cache, in the fields and the state that
    it declares. `append` and `select` run inside CUDA graphs: tensors stay on their device, nothing
    waits for it, and what runs depends on shapes and the layer alone.
    """

    flow: Flow = block_mean
    first: int = 1
    last: int = 2
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.flow, Flow):
            raise ValueError(f"Rule.flow: expected a Flow, got {self.flow!r}")
        object.__setattr__(self, "dense_layers", frozenset(self.dense_layers))
        numbers = (self.first, self.last, *self.dense_layers)
        if not all(isinstance(n, int) for n in numbers) or self.first < 0 or self.last < 1:
            expected = "first >= 0, last >= 1 (an unfinished page is always kept) and layers"
            raise ValueError(f"Rule: expected integers {expected}, got {numbers}")

    @classmethod
    def of(cls, schedule: Schedule, flow: Flow = block_mean) -> "Rule":
        """The rule that a schedule was made for; the flow must be the one it was made for."""
        rule = cls.like(schedule, flow)
        rule.check(schedule, page=schedule.page)
        return rule

    @classmethod
    def like(cls, schedule: Schedule, flow: Flow = block_mean) -> "Rule":
        """A rule of this flow with the reserved pages and dense layers of a schedule."""
        dense = frozenset(schedule.dense_layers)
        return cls(flow=flow, first=schedule.first, last=schedule.last, dense_layers=dense)

    @property
    def name(self) -> str:
        return self.flow.name

    def describe(self) -> str:
        dense = ", ".join(map(str, sorted(self.dense_layers))) or "none"
        reserved = f"first {self.first} and last {self.last} pages kept"
        return f"{self.name}, {reserved}, dense layers: {dense}"

    @property
    def mass(self) -> float | None:
        return self.flow.mass

    # What the cache must have.

    def fields(self, *, page: int, head_size: int, dtype: torch.dtype) -> tuple[ops.Field, ...]:
        """Page fields beyond "k" and "v"; `dtype` is that of the keys."""
        return tuple(trace(self.flow, page, head_size, None).blocks(dtype).values())

    def states(self, pages: int) -> tuple[ops.Field, ...]:
        """State fields of a request, for contexts of up to so many pages."""
        return tuple(
            ops.Field(name=name, shape=(pages,), dtype=torch.float32, start=start)
            for name, start in self.flow.state.items()
        )

    def prepare(
        self,
        *,
        page: int,
        head_size: int,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: int,
        kv_heads: int,
    ) -> None:
        """Check the flow for a model, on a GPU generate its kernels, and refuse what cannot run.

        Only `ops.using("reference")` runs definitions on a GPU, slowly and without graphs.
        """
        beyond = sorted(layer for layer in self.dense_layers if not 0 <= layer < layers)
        if beyond:
            raise ValueError(f"Rule.dense_layers {beyond}: the model has layers 0 to {layers - 1}")
        program = trace(self.flow, page, head_size, group)
        check_weights(program, layers=layers, kv_heads=kv_heads)
        if device.type == "cuda":
            _compiled(program, dtype)

    # What runs in a model.

    def is_dense(self, layer: int) -> bool:
        """Whether a whole layer attends to all pages."""
        return layer in self.dense_layers or self.flow.score is None

    def chooser(self, layer: int) -> int:
        """The sparse layer whose choice one uses: itself, or under `Flow.layers` one before it."""
        if self.flow.layers == 1:
            return layer
        sparse = [other for other in range(layer + 1) if other not in self.dense_layers]
        return sparse[(len(sparse) - 1) // self.flow.layers * self.flow.layers]

    def summarise(self, cache: ops.PageCache, layer: int, slots_T: Tensor) -> None:
        """Fill the fields of every page that one of these slots finishes.

        For prefill: keys and values of the slots are written already. A negative slot is padding.
        """
        k_NGPD = cache.field("k", layer)
        program = self._program(cache, None)
        if not program.fields or not self._stores(layer):
            return
        if _on_gpu(k_NGPD):
            unread = k_NGPD[:, :, 0]
            kernels = _compiled(program, k_NGPD.dtype)
            kernels.append(cache, layer, unread, unread, slots_T, write=False)
        elif fast := _block_mean_kernels(program, k_NGPD):
            fast.summarise_pages(k_NGPD, cache.field(program.fields[0].name, layer), slots_T)
        else:
            interpret.summarise_slots(program, cache, layer, slots_T)

    def append(
        self, cache: ops.PageCache, layer: int, k_BGD: Tensor, v_BGD: Tensor, slots_B: Tensor
    ) -> None:
        """Write one token per row and fill the fields of the pages they finish: decoding.

        No two slots lie in one page, and a negative slot is padding.
        """
        k_NGPD, v_NGPD = cache.field("k", layer), cache.field("v", layer)
        program = self._program(cache, None)
        if program.fields and self._stores(layer) and _on_gpu(k_NGPD):
            kernels = _compiled(program, k_NGPD.dtype)
            kernels.append(cache, layer, k_BGD, v_BGD, slots_B, write=True)
        else:
            ops.write_pages(k_NGPD, v_NGPD, k_BGD, v_BGD, slots_B)
            self.summarise(cache, layer, slots_B)

    def select(
        self,
        cache: ops.PageCache,
        layer: int,
        q_BHD: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
        budgets: Tensor,
        rows_B: Tensor | None = None,
    ) -> ops.PageLists | None:
        """The pages that each row and KV head attends to; None where the whole layer is dense.

        Called after `append`: lengths include the current token. A budget counts every kept token,
        and one of at least the length keeps every page (under a mass, DENSE alone does); it may
        differ by KV head ([B, G]). None depends on the layer alone. rows: the slots that hold the
        rows' state, if the flow has any. Only layers that choose for themselves are asked.

        Pages are scored in three ways: by definition (`flows.interpret`), by generated kernels on
        a GPU, and on a CPU, for the paper's formula, by kernels of its own.
        """
        if self.is_dense(layer):
            return None
        kv_heads = cache.field("k", layer).shape[1]
        program = self._program(cache, q_BHD.shape[1] // kv_heads)
        if _on_gpu(q_BHD):
            return _compiled(program, q_BHD.dtype).select(
                *(cache, layer, q_BHD, table_BM, lengths_B, budgets, rows_B),
                first=self.first,
                last=self.last,
            )
        if fast := _block_mean_kernels(program, q_BHD):
            means_NGD = cache.field(program.fields[0].name, layer)
            score_BGM = fast.score_pages(q_BHD, means_NGD, table_BM, lengths_B, page=cache.page)
        else:
            scene = self._scene(layer, lengths_B, budgets)
            score_BGM = interpret.score_cache(program, cache, q_BHD, table_BM, scene, rows_B)
        return ops.select_pages(
            *(score_BGM, lengths_B, budgets),
            page=cache.page,
            first=self.first,
            last=self.last,
            mass=program.mass,
        )

    def scorer(self, layer: int, page: int) -> ops.Scorer | None:
        """How a layer's pages are scored for whole sequences at once; None: it is dense."""
        if self.is_dense(layer):
            return None

        def begin(
            q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, dense: int, budgets: Tensor
        ) -> ops.Scores:
            program = trace(self.flow, page, q_SHD.shape[2], q_SHD.shape[1] // k_SGD.shape[1])
            lengths_S = torch.arange(1, len(q_SHD) + 1, device=q_SHD.device)
            scene = self._scene(layer, lengths_S, budgets)
            return interpret.score_sequence(program, q_SHD, k_SGD, v_SGD, scene, dense=dense)

        return begin

    def _stores(self, layer: int) -> bool:
        """Whether fields of a layer are read at all."""
        return self.flow.layers == 1 or (
            layer not in self.dense_layers and self.chooser(layer) == layer
        )

    def _scene(self, layer: int, lengths: Tensor, budgets: Tensor) -> ScoreContext:
        reserved = {"first": self.first, "last": self.last}
        return ScoreContext(lengths=lengths, budgets=budgets, layer=layer, **reserved)

    def _program(self, cache: ops.PageCache, group: int | None) -> Program:
        head_size = cache.field("k", 0).shape[3]
        return trace(self.flow, cache.page, head_size, group)

    def check_drafts(self, draft_tokens: int, page: int) -> None:
        """Raise ValueError if exact decoding cannot draft so many tokens a round by this rule.

        A round's own pages have no summaries before it is verified, so they must always be kept.
        """
        if self.flow.state:
            problem = "has state, which a rejected draft would have changed"
            raise ValueError(f"flow {self.name!r} {problem}: draft by a flow without state")
        most = page * (self.last - 1)
        if draft_tokens > most:
            kept = f"a rule that keeps the last {self.last} pages"
            remedy = "draft fewer, or use a schedule that keeps more"
            raise ValueError(f"draft_tokens={draft_tokens}: {kept} can draft {most}: {remedy}")

    # Schedules.

    def check(self, schedule: Schedule, *, page: int, family: str | None = None) -> None:
        """Raise ValueError if a schedule was made for anything else than what runs here.

        That is this rule at a page size, on models of a family (None: any). Budgets measured with
        one say nothing about another, so none is adapted unless `Schedule.forced_onto` was asked.
        """
        if self.flow.layers > 1 and schedule.layers:
            problem = (
                f"one choice serves {self.flow.layers} layers, so it takes no budgets by layer"
            )
            raise ValueError(
                f"flow {self.name!r}: {problem}, as schedule {schedule.name!r} has them"
            )
        wrong = schedule.misfits(
            {
                "flow": self.name,
                "flow_digest": self.flow.digest,
                "page": page,
                "first": self.first,
                "last": self.last,
                "dense_layers": tuple(sorted(self.dense_layers)),
                "family": family,
            }
        )
        if wrong:
            pairs = [f"{k} {getattr(schedule, k)!r} (here: {v!r})" for k, v in wrong.items()]
            problem = f"was not made for this: {', '.join(pairs)}; {_advice(wrong)}"
            raise ValueError(f"schedule {schedule.name!r} {problem}")


def _advice(wrong: Mapping[str, Any]) -> str:
    """What to do about a schedule that differs in these fields."""
    if wrong.keys() <= {"first", "last", "dense_layers"}:
        return "run it under its own rule: Engine(model), or Engine(model, rule=Rule.of(schedule))"
    force = ", ".join(f"{field}={value!r}" for field, value in wrong.items())
    return (
        f"use one that fits, or force this one: schedule.forced_onto({force}), on the command line "
        f"{FORCE}"
    )


def _on_gpu(tensor: Tensor) -> bool:
    """Whether generated kernels run on this tensor."""
    return tensor.is_cuda and ops.optimised_kernels_allowed()


def _compiled(program: Program, dtype: torch.dtype) -> "Compiled":
    from sparrow.sparse.compile.launch import compiled  # needs triton, which a CPU does not

    return compiled(program, dtype)


def _block_mean_kernels(program: Program, tensor: Tensor) -> ModuleType | None:
    """Return the CPU kernels, if the program is the block mean (by content, not by name)."""
    sizes = (program.page, program.head_size, program.group)
    if (
        tensor.is_cuda
        or not ops.optimised_kernels_allowed()
        or program.digest != trace(block_mean, *sizes).digest
    ):
        return None
    from sparrow.ops.cpu import pages  # numba takes a second to import

    return pages if pages.supports_dtype("score_pages", tensor.dtype, program.head_size) else None
