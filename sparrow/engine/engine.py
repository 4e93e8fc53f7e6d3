"""The rollout engine: continuous batching over paged KV, dense or sparse per request.

    engine = Engine(model)
    completions = engine.generate([[1, 2, 3]], SamplingParams(n=8), schedule=preset("..."))

or step by step: `add` requests, `step` until `idle`, `abort` at any time. A step runs what the
scheduler planned; on a GPU its results are read one step late, while the next one runs.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.memory import MemoryPlan, host_memory, plan_memory
from sparrow.engine.pool import PagePool
from sparrow.engine.requests import (
    Request,
    Sample,
    check_prompt,
    check_training,
    pages_for,
    sample_seeds,
)
from sparrow.engine.rows import STOPS, Rows
from sparrow.engine.runner import Launch, Runner
from sparrow.engine.scheduler import Policy, Preempt, Reuse, Scheduler, Work
from sparrow.engine.weights import WeightStore
from sparrow.models import Decoder
from sparrow.models.lora import Adapter, AdapterBank
from sparrow.records import Completion, OutputOptions, SamplingParams
from sparrow.sparse.block_mean import BlockMean
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flow import Flow
from sparrow.sparse.schedule import Schedule

PAGE = 16
CPU_CHUNK, GPU_CHUNK = 128, 4096  # prompt tokens of a step
EXACT_BATCH = 16  # see Engine: exact_batches
ADAPTERS, ADAPTER_RANK = 2, 64

InFlight = Literal["continue", "restart"]


class Output(NamedTuple):
    """What a step brought for one sample: tokens, and the completion if it has ended.

    Where `restarts` is higher than before, the sample began anew: earlier tokens are void.
    """

    request: int
    sample: int
    tokens: list[int]
    completion: Completion | None
    restarts: int = 0


class Engine:
    """Requests in, completions out, on one device.

    max_running    samples that decode together (default: 64 on a CPU, 256 on a GPU)
    max_context    longest sequence, prompt and answer (default: the model's)
    kv_bytes       memory for keys and values (default: a quarter of a host's, 90 % of a GPU's free)
    flow           the selection rule of sparse requests; None: dense only, without its memory
    preempt        what happens to the youngest sample when pages run out
    reuse          which pages later prompts may share: those of prompts, also of dense answers
                   (equal up to rounding), or none
    swap_bytes     host memory for samples that are out (default: half of the host's)
    exact_batches  on a CPU: pad small batches so that a sample's bits do not depend on how many
                   others run beside it (BLAS rounds products of few rows differently)
    graphs         on a GPU: capture decode steps and replay them
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_running: int | None = None,
        max_context: int | None = None,
        kv_bytes: int | None = None,
        flow: Flow | None = BlockMean(),  # noqa: B008 (immutable)
        preempt: Preempt = "swap",
        reuse: Reuse = "prompts",
        swap_bytes: int | None = None,
        exact_batches: bool = True,
        graphs: bool = True,
        adapters: int = ADAPTERS,
        adapter_rank: int = ADAPTER_RANK,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        self.model, self.flow = model, flow
        self.max_running = (256 if on_gpu else 64) if max_running is None else max_running
        if self.max_running < 1:
            raise ValueError(f"max_running={max_running}, allowed are 1 and more")
        self.max_context = _context(model, max_context)
        self.policy = Policy(
            chunk=GPU_CHUNK if on_gpu else CPU_CHUNK,
            pack=on_gpu,
            quantum=PAGE if on_gpu else CPU_CHUNK,
            preempt=preempt,
            reuse=reuse,
            swap_bytes=host_memory() // 2 if swap_bytes is None else swap_bytes,
        )
        self.version = 0
        self._kv_bytes = kv_bytes
        self._weights = WeightStore(model)
        self._adapters: dict[str, tuple[int, int]] = {}  # name -> slot, serial
        self._serials = itertools.count(1)
        spec = model.spec
        self._bank = AdapterBank(spec, adapters, adapter_rank, model.dtype, model.device)
        self._budgets = BudgetTable(layers=spec.layers, device=model.device)
        self._least_batch = EXACT_BATCH if exact_batches and not on_gpu else 1
        self._late, self._graphs = on_gpu, graphs and on_gpu
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._pending: list[Launch] = []
        self._outputs: list[Output] = []
        self._asleep = self._broken = False
        self.scheduler = Scheduler(self.policy, self._drain)
        self._allocate()

    def _allocate(self) -> None:
        """Take the memory for keys and values, and build everything that refers to it."""
        model, spec = self.model, self.model.spec
        fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
        if self.flow is not None:
            fields += self.flow.fields(spec.head_size, model.dtype)
        self.memory: MemoryPlan = plan_memory(
            model,
            fields,
            page=PAGE,
            max_context=self.max_context,
            max_running=self.max_running,
            kv_bytes=self._kv_bytes,
        )
        cache = ops.PageCache(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            page=PAGE,
            pages=self.memory.pages,
            page_fields=fields,
            device=model.device,
        )
        rows = Rows(self.max_running, pages_for(self.max_context, PAGE), model.device)
        self.pool = PagePool(self.memory.pages, PAGE)
        self.scheduler.attach(self.pool, rows, cache)
        self.runner = Runner(
            model,
            cache,
            rows,
            flow=self.flow,
            budgets=self._budgets,
            adapters=self._bank,
            least_batch=self._least_batch,
            graphs=self._graphs,
        )

    # Requests.

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        schedule: Schedule | None = None,
        adapter: str | None = None,
        options: OutputOptions | None = None,
    ) -> int:
        """Queue a prompt; the number under which its outputs come. Dense without a schedule."""
        self._mend()
        spec, options = self.model.spec, options or OutputOptions()
        check_prompt(prompt, params, spec.vocabulary, self.max_context)
        check_training(params, options)
        stops = frozenset(params.stop_token_ids)
        stops |= frozenset() if params.ignore_eos else frozenset(spec.eos_ids)
        if params.min_tokens and len(stops) > STOPS:
            raise ValueError(f"{len(stops)} stop ids with min_tokens, allowed are {STOPS}")
        if not 0 <= options.top_logprobs <= spec.vocabulary:
            raise ValueError(
                f"top_logprobs={options.top_logprobs}, but the vocabulary has {spec.vocabulary}"
            )
        slot, serial = self._adapter(adapter)
        request = Request(
            id=next(self._ids),
            prompt=[operator.index(token) for token in prompt],
            params=params,
            stop_ids=stops,
            options=options,
            schedule=schedule,
            schedule_slot=self._schedule_slot(schedule),
            adapter=adapter,
            adapter_slot=slot,
            attention="dense" if schedule is None else schedule.describe(),
            root=f"adapter {serial}".encode(),
        )
        request.samples = [
            Sample(request=request, number=number, seed=seed)
            for number, seed in enumerate(sample_seeds(params))
        ]
        self._requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request.id

    def _schedule_slot(self, schedule: Schedule | None) -> int:
        if schedule is None:
            return 0
        if self.flow is None:
            raise ValueError(f"schedule {schedule.name!r}: this engine is dense only (flow=None)")
        self.flow.check(schedule, page=PAGE)
        used = {request.schedule_slot for request in self._requests.values()}
        return self._budgets.add(schedule, used)

    def _adapter(self, name: str | None) -> tuple[int, int]:
        if name is None:
            return 0, 0
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(f"no adapter {name!r} is loaded; loaded: {known}")
        return self._adapters[name]

    def abort(self, request: int) -> None:
        """End a request now; its samples come back with what they have. Gone ones are fine."""
        if request in self._requests:
            for sample in self._requests[request].samples:
                if sample.live:
                    sample.finish = "abort"
                    self._end(sample, [])

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._pending and not self._outputs

    @property
    def asleep(self) -> bool:
        return self._asleep

    # Steps.

    def step(self) -> list[Output]:
        """Run what is due next; the tokens and completions that have come to light by then."""
        self._require_awake()
        self._weights.require()
        self._require_whole()
        work = self.scheduler.plan()
        try:
            launches = self._launch(work)
        except BaseException:
            self._broken = True  # pages that count as computed may not be
            raise
        if work and not self._late:
            self._pending = launches
            self._drain()
        else:
            self._read(self._take_pending(launches))
        stuck = not (work or self._outputs or self.scheduler.running or self.scheduler.idle)
        assert not stuck, "requests wait, but none can go on"
        outputs, self._outputs = self._outputs, []
        return outputs

    def _require_whole(self) -> None:
        """After a step has failed in the middle nothing may go on from what it left."""
        if self._broken:
            raise RuntimeError("a step has failed: abort every request, then go on with new ones")

    def _mend(self) -> None:
        """Nobody is left of those whom a failed step concerned: forget what it computed."""
        if self._broken and not self._requests:
            self._pending.clear()
            self.pool.forget()
            self._broken = False

    def _take_pending(self, launches: list[Launch]) -> list[Launch]:
        pending, self._pending = self._pending, launches
        return pending

    def _launch(self, work: Work) -> list[Launch]:
        """Start the work of a step on the device."""
        runner, launches = self.runner, []
        for chunks in work.passes:
            runner.prefill(chunks)
        if work.copies:
            source_n, target_n = runner.rows.upload(work.copies).unbind(1)
            runner.cache.copy_pages(source_n, target_n)
        if work.decode:
            launches.append(Launch(work.decode, runner.decode(work.decode), self.version))
        if work.births:
            launches.append(Launch(work.births, runner.first_draws(work.births), self.version))
        for sample in (*work.decode, *work.births):
            sample.drawn += 1
        for request in {sample.request for sample in work.births}:
            if not request.context.pages:  # its last sample, or one for want of room, has them
                request.logits_V = request.hidden_C = None
        return launches

    def _drain(self) -> None:
        """Read everything that was launched."""
        self._read(self._take_pending([]))

    def _read(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            due = [sample for sample in launch.samples if sample.live]
            launch.read()
            for sample in due:
                tokens = sample.tokens[-1:] if sample.error is None else []
                if sample.live:
                    request, number = sample.request.id, sample.number
                    self._outputs.append(Output(request, number, tokens, None, sample.restarts))
                else:
                    self._end(sample, tokens)

    def _end(self, sample: Sample, tokens: list[int]) -> None:
        self.scheduler.retire(sample)
        request = sample.request
        completion = sample.completion(self.model.spec.layers)
        self._outputs.append(Output(request.id, sample.number, tokens, completion, sample.restarts))
        if not any(other.live for other in request.samples):
            self._requests.pop(request.id, None)

    # On top of steps.

    def stream(self) -> Iterator[Output]:
        """Outputs as they come, until nothing is left to do; those not taken come with a step."""
        while not self.idle:
            outputs = self.step()
            try:
                while outputs:
                    yield outputs.pop(0)
            finally:
                self._outputs = outputs + self._outputs
        self.check_integrity()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        schedule: Schedule | None = None,
        adapter: str | None = None,
        options: OutputOptions | None = None,
    ) -> list[Completion]:
        """n completions of every prompt, prompt by prompt; params for all or one for each."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling params")
        if self._requests:
            raise ValueError("the engine has requests already: add these too, and use stream()")
        ids: list[int] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                ids.append(
                    self.add(prompt, own, schedule=schedule, adapter=adapter, options=options)
                )
            done = {
                (output.request, output.sample): output.completion
                for output in self.stream()
                if output.completion is not None and output.request in ids
            }
        except BaseException:
            self._abandon(ids)
            raise
        return [completion for _, completion in sorted(done.items(), key=lambda item: item[0])]

    def _abandon(self, ids: Iterable[int]) -> None:
        """Leave nothing behind of requests whose caller has gone."""
        self._pending.clear()
        for request in ids:
            self.abort(request)
        self._outputs.clear()

    # Weights and adapters.

    def update(
        self,
        items: Iterable[tuple[str, Tensor]],
        *,
        version: int,
        base_version: int | None = None,
        in_flight: InFlight = "continue",
    ) -> None:
        """Take over weights by Hugging Face names, between steps.

        Without a base version the items must be the whole model; with one they are a part of it,
        to be laid over exactly that version. Keys and values of the older weights are dropped:
        samples in flight go on with all of theirs computed anew under the new weights, and their
        tokens say which version drew them, or restart.
        """
        if in_flight not in ("continue", "restart"):
            raise ValueError(f"in_flight must be continue or restart, got {in_flight!r}")
        if version < self.version or (version == self.version and self._weights.present):
            raise ValueError(f"version {version} is not newer than the engine's {self.version}")
        self._require_awake()
        self._drain()
        self._weights.write(items, have=self.version, base=base_version)
        self.version = version
        self.pool.forget()
        self._renew(self._requests.values(), in_flight)

    def _renew(self, requests: Iterable[Request], in_flight: InFlight) -> None:
        """Nothing computed so far is valid any more for these requests."""
        for request in requests:
            self.scheduler.renew(request, restart=in_flight == "restart")

    def load_adapter(
        self, name: str, adapter: Adapter, *, in_flight: InFlight = "continue"
    ) -> None:
        """Make an adapter usable by name, or put another under that name, between steps."""
        self._require_awake()
        self._drain()
        taken = {slot for slot, _ in self._adapters.values()}
        free = [slot for slot in range(1, self._bank.capacity + 1) if slot not in taken]
        if name not in self._adapters and not free:
            raise ValueError(
                f"no room for adapter {name!r}: {sorted(self._adapters)} are loaded; drop one, or "
                "build the engine with more adapters"
            )
        slot = self._adapters[name][0] if name in self._adapters else free[0]
        first = not self._bank.held
        self._bank.put(slot, adapter)
        if first and self.runner.graphs is not None:
            self.runner.graphs.forget()
        self._adapters[name] = (slot, next(self._serials))
        users = [request for request in self._requests.values() if request.adapter == name]
        for request in users:
            request.root = f"adapter {self._adapters[name][1]}".encode()
        self._renew(users, in_flight)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        slot, _ = self._adapter(name)
        users = [request.id for request in self._requests.values() if request.adapter == name]
        if users:
            raise ValueError(f"adapter {name!r} is in use by requests {users}")
        self._bank.clear(slot)
        del self._adapters[name]

    # Sleep.

    def sleep(self, *, weights: Literal["keep", "host", "drop"] = "host") -> None:
        """Give memory back: keys and values, and weights unless they are kept.

        Samples in flight wait in host memory, bit for bit. Dropped weights come back by a whole
        `update` after `wake`.
        """
        self._require_awake()
        self._weights.check_stay(weights)
        self._drain()
        self.scheduler.vacate()
        del self.runner, self.pool
        self._weights.leave(weights)
        self._asleep = True
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory again and go on where `sleep` left off."""
        if not self._asleep:
            raise ValueError("the engine is awake")
        self._weights.enter()
        self._allocate()
        self._asleep = False

    def _require_awake(self) -> None:
        if self._asleep:
            raise ValueError("the engine sleeps: wake() it first")

    # Telling.

    def header(self) -> str:
        """One line that says what runs."""
        model, spec = self.model, self.model.spec
        device = model.device.type
        fast = ops.versions(device, model.dtype, spec.head_size)
        kernels = ", ".join(sorted({name.rsplit(".", 2)[-2] for name in fast.values()}))
        rule = f"{self.flow.name} rule at hand" if self.flow is not None else "dense only"
        return (
            f"{spec.family}, {spec.parameters() / 1e6:.1f} M weights v{self.version}, "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device} | page {PAGE}, {rule} | "
            f"{self.memory.describe()} | up to {self.max_running} at once, "
            f"{'CUDA graphs' if self._graphs else 'eager'} | "
            f"ops: {', '.join(sorted(fast)) or 'none'} by {kernels or 'nothing faster'}, "
            "others by definition"
        )

    def check_integrity(self) -> None:
        """Every page is free, cached or owned exactly as often as it is held; so are the rows."""
        if self._asleep:
            return
        self.pool.check(self.scheduler.held_pages())
        self.scheduler.check()
        if self.idle:
            assert self.pool.available == self.pool.pages, "an idle engine holds pages"


def _context(model: Decoder, wanted: int | None) -> int:
    most = model.spec.max_positions
    if wanted is not None and not 1 <= wanted <= most:
        raise ValueError(f"max_context={wanted}, but the model's context is {most}")
    return wanted or most
