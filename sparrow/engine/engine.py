"""The rollout engine: continuous batching over paged KV, dense or sparse per request.

    engine = Engine(model)
    completions = engine.generate([[1, 2, 3]], SamplingParams(n=8), schedule=preset("..."))
    engine.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text

or step by step: `add` requests, `step` until `idle`, `abort` at any time. A step runs what the
scheduler planned; on a GPU its results are read one step late, while the next one runs.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from sparrow import ops
from sparrow.engine.language import Language
from sparrow.engine.loop import Loop, Output
from sparrow.engine.memory import allocate, host_memory
from sparrow.engine.pool import EXACT_BATCH, PAGE
from sparrow.engine.requests import ACTOR, Request, stop_ids
from sparrow.engine.runner import Runner, without_kernel
from sparrow.engine.scheduler import Reuse, Scheduler, SchedulerPolicy
from sparrow.engine.speculation import DraftRoom
from sparrow.engine.weights import Items, Stay, WeightStore
from sparrow.models import Decoder
from sparrow.models.deltas import Delta
from sparrow.models.int8 import Int8Decoder
from sparrow.models.lora import Adapter, AdapterBank, MergedDecoder
from sparrow.schema.sampling import (
    Completion,
    OutputOptions,
    SamplingParams,
    SpeculativeParams,
)
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.loading import resolve_flow
from sparrow.sparse.rule import Rule

TextOrIds = str | Sequence[int]


class Engine:
    """Requests in, completions out, on one device.

    max_running    samples that decode together (default: 64 on a CPU, 256 on a GPU)
    max_context    longest sequence, prompt and answer (default: the model's)
    kv_bytes       memory for keys and values (default: a quarter of a host's, 90 % of a GPU's free)
    rule           the selection rule of sparse requests. "auto": the rule of each schedule, so one
                   rule at a time; None: dense only, without memory for page summaries
    reuse          which pages later prompts may share: those of prompts, or none
    swap_bytes     host memory for samples that are out (default: half of the host's)
    exact_batches  on a CPU: pad small batches so that a sample's bits do not depend on how many
                   others run beside it (BLAS rounds products of few rows differently)
    graphs         on a GPU: capture decode steps and replay them
    adapters       LoRA adapters that can be loaded at once, of rank up to `adapter_rank`, the
                   actor's among them; their memory is taken when the first one is loaded
    speculative    room for drafts of such requests from the start; it grows as requests need it
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_running: int | None = None,
        max_context: int | None = None,
        kv_bytes: int | None = None,
        rule: Rule | Literal["auto"] | None = "auto",
        reuse: Reuse = "prompts",
        swap_bytes: int | None = None,
        exact_batches: bool = True,
        graphs: bool = True,
        adapters: int = 2,
        adapter_rank: int = 64,
        speculative: SpeculativeParams | None = None,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        if on_gpu and model.device.index not in (None, torch.cuda.current_device()):
            raise ValueError(f"the model is on {model.device}: torch.cuda.set_device it first")
        if rule is not None and rule != "auto" and not isinstance(rule, Rule):
            raise ValueError(f"rule={rule!r}, expected a Rule, auto or None")
        if not isinstance(speculative, SpeculativeParams | None):
            raise ValueError(f"speculative={speculative!r:.80}, expected SpeculativeParams")
        if speculative is not None and rule is None:
            raise ValueError("speculative: a dense engine (rule=None) cannot draft")
        self._auto_rule = rule == "auto"
        self.model, self.rule = model, Rule() if isinstance(rule, str) else rule
        self.max_running = (256 if on_gpu else 64) if max_running is None else max_running
        if self.max_running < 1:
            raise ValueError(f"max_running={max_running}, expected 1 or more")
        self.max_context = model.spec.max_positions if max_context is None else max_context
        if not 1 <= self.max_context <= model.spec.max_positions:
            most = model.spec.max_positions
            raise ValueError(f"max_context={max_context}, but the model's context is {most}")
        swap_bytes = host_memory() // 2 if swap_bytes is None else swap_bytes
        self.policy = SchedulerPolicy(pack=on_gpu, reuse=reuse, swap_bytes=swap_bytes)
        self.version = 0
        self.owned = False  # whether an AsyncEngine steps it
        self._kv_bytes = kv_bytes
        self._weights = WeightStore(model)
        self._adapters = AdapterBank(model.spec, adapters, adapter_rank, model.dtype, model.device)
        self._actor: MergedDecoder | None = None
        self._int8: Int8Decoder | None = None
        spec, device = model.spec, model.device
        self._budgets = BudgetTable(layers=spec.layers, kv_heads=spec.kv_heads, device=device)
        self._least_batch = EXACT_BATCH if exact_batches and not on_gpu else 1
        self._graphs = graphs and on_gpu and not without_kernel(model, self.rule)
        self._ids = itertools.count()
        self._draft_room = DraftRoom() if speculative is None else DraftRoom.of(speculative)
        self.asleep = False
        self.loop = Loop(self.policy, spec=model.spec, rule=self.rule)
        self._allocate()

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    def _allocate(self) -> None:
        """Allocate the KV cache, and build everything that refers to it."""
        if self._actor is not None:
            self._actor.allocate()  # first: what is left is for keys and values
        int8_bytes = self._allocate_int8()
        sizes = self.max_running, self.max_context, self._kv_bytes, self._draft_room, int8_bytes
        self.memory, cache, rows, self.pool, self._drafts = allocate(self.model, self.rule, *sizes)
        self.scheduler.attach(self.pool, rows, cache)
        self._build_runner()

    def _allocate_int8(self) -> int:
        """Allocate weights in 8 bits if drafts want them, of what drafts would run with; bytes."""
        source = self.model if self._actor is None else self._actor.decoder
        if not self._draft_room.int8:
            self._int8 = None
            return 0
        if self._int8 is None or self._int8.source is not source:
            self._int8 = Int8Decoder(source)
        self._int8.allocate()
        return self._int8.nbytes

    def _build_runner(self) -> None:
        self.runner = Runner(
            self.model,
            self.scheduler.cache,
            self.scheduler.rows,
            rule=self.rule,
            budgets=self._budgets,
            adapters=self._adapters,
            merged=None if self._actor is None else self._actor.decoder,
            int8=None if self._int8 is None else self._int8.decoder,
            drafts=self._drafts,
            least_batch=self._least_batch,
            graphs=self._graphs,
        )

    def _release(self) -> None:
        """Free the KV cache; samples wait in host memory."""
        self.loop.drain()
        self.scheduler.vacate()
        del self.runner, self.pool, self._drafts

    @cached_property
    def language(self) -> Language:
        """The language of the model, for prompts that are text."""
        return Language.load(self.model)

    # Requests.

    def add(
        self,
        prompt: TextOrIds,
        params: SamplingParams,
        *,
        schedule: Schedule | None = None,
        speculative: SpeculativeParams | None = None,
        adapter: str | None = None,
        options: OutputOptions | None = None,
        streamed: bool = True,
        interval: float = 0.0,
    ) -> int:
        """Queue a prompt and return the id of the request. Dense without a schedule.

        speculative: exact decoding. The schedule is then that of the drafts alone; tokens have the
        distribution of dense decoding.
        adapter: one that is loaded. Where there is an actor, requests with a schedule have its own.
        Text is encoded as it is, without a chat template, and its completions have text too.
        streamed: whether tokens come as they are drawn. Otherwise only completions come, which
        costs the host less. interval: seconds between outputs of a sample, whose tokens come
        together then.
        """
        for name, value, kind in (
            ("params", params, SamplingParams),
            ("speculative", speculative, SpeculativeParams | None),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name}: expected {kind}, got {value!r:.80}")
        if speculative is not None and schedule is None:
            raise ValueError("speculative: drafts need a schedule, such as Schedule.fixed(512)")
        if speculative is not None:
            self.check_drafts(schedule, speculative)
        self._check_name(adapter)
        adapter = self._adapter_under(schedule, adapter)
        decode = None
        if isinstance(prompt, str):
            decode, prompt = self.language.decode, self.language.encode(prompt, raw=True)
        request = Request(
            id=next(self._ids),
            prompt=prompt.tolist() if hasattr(prompt, "tolist") else list(prompt),
            decode=decode,
            params=params,
            stop_ids=stop_ids(self.model.spec, params),
            options=options or OutputOptions(),
            schedule=schedule,
            speculative=speculative,
            adapter=adapter,
            adapter_slot=self._adapters.find(adapter),
            streamed=streamed,
            interval=interval,
        )
        request.check(self.model.spec, self.max_context)
        request.schedule_slot = self._schedule_slot(schedule, self.loop.requests.values())
        if speculative is not None:
            self._make_draft_room(DraftRoom.of(speculative))
        self.loop.add(request)
        return request.id

    def check_drafts(self, schedule: Schedule | None, speculative: SpeculativeParams) -> None:
        """Refuse drafts that this engine, or the rule of their schedule, cannot make."""
        if self.rule is None:
            raise ValueError("speculative: this engine is dense only (rule=None)")
        if isinstance(schedule, Schedule):
            rule = self._rule_for(schedule) if self._auto_rule else self.rule
            rule.check_drafts(speculative.draft_tokens, PAGE)
        if self.model.device.type == "cuda":
            from sparrow.ops.kernels.attend_decode import MOST_QUERIES  # needs triton

            most = MOST_QUERIES // (self.model.spec.heads // self.model.spec.kv_heads) - 1
            if speculative.draft_tokens > most:
                raise ValueError(
                    f"draft_tokens={speculative.draft_tokens}: the GPU kernel of this "
                    f"model's heads verifies up to {most}"
                )

    def _make_draft_room(self, room: DraftRoom) -> None:
        """Allocate room for drafts; samples in flight wait in host memory meanwhile."""
        former, room = self._draft_room, self._draft_room.including(room)
        if room == former:
            return
        if self.asleep:
            self._draft_room = room
            return
        self._release()
        self._draft_room = room
        try:
            self._allocate()
        except Exception:  # such as too little memory
            self._draft_room = former
            self._allocate()
            raise

    def _schedule_slot(self, schedule: Schedule | None, others: Iterable[Request]) -> int:
        """Return the slot of a schedule in the budget table, beside those of other requests."""
        if schedule is None:
            return 0
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule {schedule!r}: expected a Schedule, such as preset(name)")
        if self.rule is None:
            raise ValueError(f"schedule {schedule.name!r}: this engine is dense only (rule=None)")
        others = list(others)
        rule = self._rule_for(schedule) if self._auto_rule else self.rule
        rule.check(schedule, page=PAGE, family=self.model.spec.family)
        if rule != self.rule:
            self._change_rule(rule, schedule, others)
        return self._budgets.add(schedule, {request.schedule_slot for request in others})

    def _rule_for(self, schedule: Schedule) -> Rule:
        """Return the rule of a schedule, with the current flow if that is its flow."""
        assert self.rule is not None
        flow, made_for = self.rule.flow, schedule.flow_digest
        same = flow.name == schedule.flow and made_for in (None, flow.digest)
        return Rule.like(schedule, flow if same else resolve_flow(schedule))

    def _change_rule(self, rule: Rule, schedule: Schedule, others: Sequence[Request]) -> None:
        """Switch to another rule; refused while a request runs under the present one.

        Another flow stores other page summaries, so it also waits for dense requests.
        """
        assert self.rule is not None
        new_flow = rule.flow is not self.rule.flow
        sparse = (request for request in others if request.schedule is not None)
        busy = list(self.loop.requests) if new_flow else [request.id for request in sparse]
        if busy:
            raise ValueError(
                f"schedule {schedule.name!r} has another rule ({rule.describe()}) than running "
                f"requests {busy[:5]} ({self.rule.describe()}): wait, or use a second engine"
            )
        former = self.rule
        self.rule = self.loop.rule = rule
        if self.asleep:
            return
        self.loop.drain()
        if not new_flow:
            self._build_runner()  # captured steps hold the former rule
            return
        self._release()
        try:
            self._allocate()
        except Exception:  # such as too little memory for the page summaries of this flow
            self.rule = self.loop.rule = former
            self._allocate()
            raise

    def reschedule(self, which: int | Schedule, schedule: Schedule | None) -> list[int]:
        """Change the schedule of a request, or of all under a schedule, from the next step on.

        None is dense. Returns the ids of the requests that changed; finished ones are ignored.
        Keys and values stay, memory and captured steps too; completions record what ran, and when.
        But where the engine has an actor, its adapter comes and goes with the schedule: samples
        that become dense or sparse go on with their keys and values computed anew.
        """
        if not isinstance(which, int | Schedule):
            raise ValueError(f"reschedule: expected a request id or a Schedule, got {which!r}")
        if self._actor is not None:
            self.loop.drain()
        requests = self.loop.requests.values()
        chosen = [request for request in requests if which in (request.id, request.schedule)]
        for request in chosen:
            if request.speculative is not None:
                self.check_drafts(schedule, request.speculative)
            self._adapter_under(schedule, request.adapter)
        slot = self._schedule_slot(schedule, [other for other in requests if other not in chosen])
        for request in chosen:
            request.schedule, request.schedule_slot = schedule, slot
            for sample in request.samples:
                if request.speculative is None:
                    sample.history.change(sample.drawn, schedule)
                if sample.row is not None:
                    self.scheduler.rows.schedule_R[sample.row] = slot
            self._follow_actor(request, "recompute")
        return [request.id for request in chosen]

    def abort(self, request: int, sample: int | None = None) -> None:
        """Abort a request, or one sample of it; samples are returned as they are.

        Finished ones are ignored.
        """
        self.loop.abort(request, sample)

    def step(self) -> list[Output]:
        """Run the next step; return the tokens and completions that are available by then."""
        self._require_awake()
        self._weights.require()
        if self._actor is not None:
            self._actor.renew()
        if self._int8 is not None:
            self._int8.renew()
        outputs = self.loop.step(self.runner, self.version)
        if self.idle:
            self.check_integrity()
        return outputs

    @property
    def idle(self) -> bool:
        return self.loop.idle

    # On top of steps.

    def stream(self) -> Iterator[Output]:
        """Yield outputs until the engine is idle; the next step returns those not consumed."""
        while not self.idle:
            outputs = self.step()
            try:
                while outputs:
                    yield outputs.pop(0)
            finally:
                self.loop.outputs = outputs + self.loop.outputs

    def generate(
        self,
        prompts: str | Sequence[TextOrIds],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        schedule: Schedule | None = None,
        speculative: SpeculativeParams | None = None,
        adapter: str | None = None,
        options: OutputOptions | None = None,
    ) -> list[Completion]:
        """Return n completions of every prompt, prompt by prompt; params for all or one for each.

        A prompt is text or token ids; one text is a list of one.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        by_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(prompts) and isinstance(prompts[0], int):
            raise ValueError("expected a list of prompts, each text or a list of token ids")
        if len(by_prompt) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(by_prompt)} sampling params")
        if self.loop.requests:
            raise ValueError("the engine has requests already: add these too, and use stream()")
        settings: dict[str, Any] = {
            "schedule": schedule,
            "speculative": speculative,
            "adapter": adapter,
            "options": options,
        }
        ids: set[int] = set()
        try:
            for prompt, sampling in zip(prompts, by_prompt, strict=True):
                ids.add(self.add(prompt, sampling, **settings, streamed=False))
            outputs = list(self.stream())
        except BaseException:  # an interrupt too: nobody is left who could take the rest
            self.loop.abandon(ids)
            raise
        self.loop.outputs = [output for output in outputs if output.request not in ids]
        own = [output for output in outputs if output.request in ids]  # one for each sample
        own.sort(key=lambda output: (output.request, output.sample))
        return [output.completion for output in own if output.completion is not None]

    # Weights and adapters.

    def update(
        self,
        items: Items,
        *,
        version: int,
        base_version: int | None = None,
        in_flight: InFlight = "recompute",
    ) -> int:
        """Load new weights by their Hugging Face names into the model itself, between steps.

        Without a base version the items must be the whole model; with one they are a part of it,
        to be laid over exactly that version. All are looked at before any is written, so tensors
        that a generator makes are in memory together.

        in_flight: what becomes of samples that have begun. Tokens say which version drew them.
            keep       they go on at once with the keys and values that older weights computed,
                       and with a flow's state; one that is being recomputed begins that anew
            recompute  keys and values of all their tokens are computed anew, densely, under the
                       new weights; a flow's state starts afresh
            restart    they begin again, without tokens
        Prompts with samples yet to begin are computed anew in any case, and nothing that older
        weights computed is shared with later requests. Returns the tokens that samples in flight
        had.
        """
        self._check_version(version)
        self._pause(in_flight)
        self._weights.write(items, have=self.version, base=base_version)
        return self._renew(version, in_flight)

    def apply_delta(
        self, delta: Delta, *, in_flight: InFlight = "recompute", reset: bool = False
    ) -> int:
        """Lead the weights to the version of a delta, in place, between steps; else as `update`.

        The digest of the present weights is computed once, then it follows the deltas. reset: a
        whole version may have any number, as that of another run; samples in flight begin again.
        """
        if reset and not delta.is_whole:
            raise ValueError("a reset needs a whole version")
        in_flight = "restart" if reset else in_flight
        self._check_version(delta.version, reset=reset)
        self._pause(in_flight)
        self._weights.apply(delta, have=self.version)
        return self._renew(delta.version, in_flight)

    def digest(self) -> int:
        """The digest of the weights (`sparrow.models.deltas.digest`); ValueError: they are out."""
        self._weights.require()
        return self._weights.digest()

    def _check_version(self, version: int, *, reset: bool = False) -> None:
        if not isinstance(version, int) or not 0 <= version < 2**31:
            raise ValueError(f"version must be a whole number below 2**31, got {version!r}")
        older = version < self.version or (version == self.version and self._weights.present)
        if older and not reset:
            raise ValueError(f"version {version} is not newer than the engine's {self.version}")

    def _renew(self, version: int, in_flight: InFlight) -> int:
        """Go on under other weights; the tokens that samples in flight had."""
        self.version = version
        self.pool.forget()
        requests = self.loop.requests.values()
        tokens = sum(len(s.tokens) for request in requests for s in request.samples if s.live)
        for request in requests:
            self.scheduler.renew(request, in_flight)
        return tokens

    def _pause(self, in_flight: InFlight) -> None:
        """Read everything that was launched, before weights or adapters change."""
        if in_flight not in get_args(InFlight):
            raise ValueError(f"in_flight must be one of {get_args(InFlight)}, got {in_flight!r}")
        self._require_awake()
        self.loop.drain()

    def load_adapter(
        self, name: str, adapter: Adapter, *, in_flight: InFlight = "recompute"
    ) -> None:
        """Load an adapter under a name, or replace the one of that name, between steps.

        in_flight: as in `update`, of samples that use the one that is replaced.
        """
        self._check_name(name)
        self._pause(in_flight)
        slot = self._adapters.put(name, adapter)
        users = [request for request in self.loop.requests.values() if request.adapter == name]
        for request in users:
            request.adapter_slot = slot
            self.scheduler.renew(request, in_flight)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter that no request uses."""
        self._check_name(name)
        users = [request.id for request in self.loop.requests.values() if request.adapter == name]
        if users:
            raise ValueError(f"adapter {name!r} is in use by requests {users}")
        self._adapters.drop(name)

    def set_actor(self, adapter: Adapter | None, *, in_flight: InFlight = "recompute") -> None:
        """Set the adapter of sparse decoding, or remove it (None), between steps.

        Every request with a schedule uses it, for its prompt too; dense ones never do. Exact
        decoding drafts with it and verifies without, so tokens have the distribution of dense
        decoding. Steps whose requests all use it run at the speed of plain weights, on a copy of
        those that it changes: memory that comes off that for keys and values. in_flight: as in
        `update`, of samples whose adapter changes. Where memory is allocated anew, kept ones wait
        in host memory meanwhile.
        """
        self._pause(in_flight)
        if adapter is None and self._actor is None:
            return
        if adapter is None:
            self._adapters.drop(ACTOR)
        else:
            own = [r.id for r in self._sparse_requests() if r.adapter not in (None, ACTOR)]
            if own:
                raise ValueError(f"requests {own[:5]} have a schedule and an adapter of their own")
            self._adapters.put(ACTOR, adapter)
        if adapter is not None and self._actor is not None and self._actor.load(adapter):
            self._follow_all(in_flight)
            return
        self._actor = None if adapter is None else MergedDecoder(self.model, adapter)
        self._follow_all(in_flight)
        self._release()
        try:
            self._allocate()
        except Exception:  # such as too little memory
            if self._actor is None:
                raise
            self._actor.free()  # the traceback still refers to it
            self._actor = None
            self._adapters.drop(ACTOR)
            self._follow_all(in_flight)
            self._allocate()
            raise

    def _sparse_requests(self) -> list[Request]:
        return [request for request in self.loop.requests.values() if request.schedule is not None]

    def _follow_all(self, in_flight: InFlight) -> None:
        for request in self._sparse_requests():
            self._follow_actor(request, in_flight)

    def _follow_actor(self, request: Request, in_flight: InFlight) -> None:
        """Give a request the adapter that goes with its schedule; renew what another computed."""
        slots = request.adapter_slot, request.policy_slot
        own = None if request.adapter == ACTOR else request.adapter
        request.adapter = self._adapter_under(request.schedule, own)
        request.adapter_slot = self._adapters.find(request.adapter)
        if request.policy_slot != slots[1]:
            self.scheduler.renew(request, in_flight)
        elif request.adapter_slot != slots[0]:  # that of drafts
            for sample in request.samples:
                if sample.row is not None:
                    self.scheduler.rows.adapter_R[sample.row] = request.adapter_slot.slot

    def _adapter_under(self, schedule: Schedule | None, adapter: str | None) -> str | None:
        """The adapter of a request that asks for one, or for none, under a schedule."""
        if self._actor is None or schedule is None:
            return adapter
        if adapter not in (None, ACTOR):
            raise ValueError(
                f"adapter {adapter!r} with a schedule: sparse decoding uses the actor's adapter "
                "here; set_actor(None) removes it"
            )
        return ACTOR

    def _check_name(self, name: str | None) -> None:
        if name == ACTOR:
            raise ValueError(f"adapter {name!r} is that of sparse decoding: see set_actor")

    # Sleep.

    def sleep(self, *, weights: Stay = "host") -> None:
        """Free memory: the KV cache, and the weights unless they are kept.

        Samples in flight wait in host memory, bit for bit. Dropped weights come back by a whole
        `update` after `wake`. Adapters stay where they are.
        """
        self._require_awake()
        if weights not in get_args(Stay):
            raise ValueError(f"weights must be one of {get_args(Stay)}, got {weights!r}")
        self._release()
        self.asleep = True
        self._weights.offload(weights)
        for copy in (self._actor, self._int8):
            if copy is not None and weights != "keep":
                copy.free()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the memory again and resume where `sleep` left off."""
        if not self.asleep:
            raise ValueError("the engine is awake")
        self._weights.reload()
        self._allocate()
        self.asleep = False

    @property
    def ready(self) -> bool:
        """Whether it can step: it is awake, and its weights were not dropped."""
        return not self.asleep and self._weights.present

    def _require_awake(self) -> None:
        if self.asleep:
            raise ValueError("the engine sleeps: wake() it first")

    # Descriptions and checks.

    def header(self) -> str:
        """Describe the engine in one line."""
        rule = f"{self.rule.name} rule" if self.rule is not None else "dense only"
        lacking = ", ".join(sorted(without_kernel(self.model, self.rule)))
        actor = "" if self._actor is None else f", actor of rank {self._actor.adapter.rank}"
        why = f" (no kernel here for {lacking})" if self.policy.pack and lacking else ""
        return (
            f"{describe_model(self.model)}, v{self.version} | page {PAGE}, {rule}{actor} | "
            f"{self.memory.describe()} | up to {self.max_running} at once, "
            f"{'CUDA graphs' if self._graphs else f'eager{why}'} | {describe_ops(self.model)}"
        )

    def check_integrity(self) -> None:
        """Check that every page and row is free, cached, or owned as often as it is referenced.

        And between steps no row is within a round of exact decoding.
        """
        if self.asleep:
            return
        self.pool.check(self.scheduler.held_pages())
        self.scheduler.check()
        if self._drafts is not None and (self.idle or not self.policy.pack):  # a GPU would wait
            assert not self._drafts.state.count_R.any(), "a round of drafts was not verified"
        if self.idle:
            assert self.pool.available == self.pool.pages, "an idle engine holds pages"


def describe_model(model: Decoder) -> str:
    """Describe a model for headers: family, size, dtype and device."""
    size, dtype = model.spec.parameters() / 1e6, str(model.dtype).removeprefix("torch.")
    return f"{model.spec.family}, {size:.1f} M weights, {dtype} on {model.device}"


def describe_ops(model: Decoder) -> str:
    """Name the ops that have optimised kernels for a model on its device, for headers."""
    fast = ops.versions(model.device.type, model.dtype, model.spec.head_size)
    return f"optimised kernels: {', '.join(sorted(fast)) or 'none'}"
