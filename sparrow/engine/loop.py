"""The step loop: run what the scheduler planned, read what was drawn, end what has ended.

On a GPU results are read one step late, while the next step runs: the device needs nothing of the
host to go on, and the host learns a step later that a sample has ended.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sparrow.engine.requests import Request, Sample
from sparrow.engine.runner import Delivery, Runner, VerifyDelivery
from sparrow.engine.scheduler import Scheduler, SchedulerPolicy, SwapFull, Work
from sparrow.models import ModelSpec
from sparrow.schema.sampling import Completion
from sparrow.sparse.rule import Rule

PHASES = 8  # of outputs of many requests within an interval


class Output(NamedTuple):
    """Output of a step for one sample: new tokens, and the completion if it has ended.

    logprobs are those of the tokens, top the ids and log-probs of the most likely ones, if asked
    for. Where `restarts` is higher than before, the sample began anew: earlier tokens are void. Of
    a request that is not streamed a sample has one output, at its end.
    """

    request: int
    sample: int
    tokens: list[int]
    completion: Completion | None
    restarts: int = 0
    logprobs: Sequence[float] = ()
    top: Sequence[tuple[Any, Any]] = ()


class Loop:
    """Runs requests step by step: plan, launch, read, finish."""

    def __init__(self, policy: SchedulerPolicy, *, spec: ModelSpec, rule: Rule | None) -> None:
        self.scheduler = Scheduler(policy, self.drain)
        self.requests: dict[int, Request] = {}
        self.outputs: list[Output] = []
        self.one_step_late = policy.pack  # on a GPU
        self.spec, self.rule = spec, rule
        self._pending: list[Delivery] = []
        self._broken = False

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._pending and not self.outputs

    def add(self, request: Request) -> None:
        self._recover()
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)

    def abort(self, number: int, sample: int | None = None) -> None:
        if number in self.requests:
            for one in self.requests[number].samples:
                if one.live and sample in (None, one.number):
                    one.finish = "abort"
                    self._end(one)

    def abandon(self, numbers: Iterable[int]) -> None:
        """Drop requests whose caller has gone."""
        self._pending.clear()
        for number in list(numbers):
            if self._broken:
                self.requests.pop(number, None)
            else:
                self.abort(number)
        self.outputs.clear()
        self._recover()

    def step(self, runner: Runner, version: int) -> list[Output]:
        """Plan and launch a step under these weights; return the outputs available by then."""
        self._recover()
        if self._broken:
            raise RuntimeError("a step has failed: abort every request, then add new ones")
        try:
            work = self._run(runner, version)
        except SwapFull:
            raise  # found before anything was touched
        except BaseException:
            self._broken = True  # pages may count as computed that are not, draws may be lost
            raise
        stuck = not (work or self.outputs or self.scheduler.running or self.scheduler.idle)
        assert not stuck, "requests wait, but none can run"
        outputs, self.outputs = self.outputs, []
        return outputs

    def _run(self, runner: Runner, version: int) -> Work:
        """Plan and launch a step, then read it; on a GPU, read the step before it."""
        work = self.scheduler.plan()
        launched = _launch(work, runner, version)
        if self.one_step_late:
            self._pending, launched = launched, self._pending
        self._read(launched)
        return work

    def drain(self) -> None:
        """Read everything that was launched."""
        launched, self._pending = self._pending, []
        self._read(launched)

    def _recover(self) -> None:
        """Reset after a failed step, once none of its requests is left."""
        if self._broken and not self.requests:
            self._pending.clear()
            self.scheduler.reset()
            self._broken = False

    def _read(self, launched: Iterable[Delivery]) -> None:
        """Wait for what was drawn, add it to its samples, and end those that are complete."""
        for delivery in launched:
            read, now = delivery.read(), time.monotonic()
            for sample, _ in read:
                if sample.finish is not None:
                    self._end(sample)
                elif sample.request.streamed and sample.due <= now:
                    # Requests that began together do not come together: that would hold up steps.
                    share = 1.0 if sample.emitted else (1 + sample.request.id % PHASES) / PHASES
                    sample.due = now + sample.request.interval * share
                    self._emit(sample, None)

    def _end(self, sample: Sample) -> None:
        """Release what an ended sample holds, and emit its last tokens and its completion."""
        if not self._broken:  # else nothing of what the scheduler holds can be trusted
            self.scheduler.retire(sample)
        self._emit(sample, sample.completion(self.spec, self.rule))
        if not any(other.live for other in sample.request.samples):
            self.requests.pop(sample.request.id, None)

    def _emit(self, sample: Sample, completion: Completion | None) -> None:
        start, sample.emitted = sample.emitted, len(sample.tokens)
        output = Output(
            request=sample.request.id,
            sample=sample.number,
            tokens=sample.tokens[start:],
            completion=completion,
            restarts=sample.restarts,
            logprobs=sample.logprobs[start:],
            top=sample.top[start:],
        )
        self.outputs.append(output)


def _launch(work: Work, runner: Runner, version: int) -> list[Delivery]:
    """Launch the work of a step on the device."""
    launches = []
    for chunks in work.passes:
        runner.prefill(chunks)
    if work.copies:
        source_n, target_n = runner.rows.upload(work.copies).unbind(1)
        runner.cache.copy_pages(source_n, target_n)
    for samples, ahead, reuse in work.decodes:
        output = runner.decode(samples, ahead=ahead, reuse=reuse)
        drawing = [sample if sample.request.speculative is None else None for sample in samples]
        launches += [Delivery(drawing, output, version)] if any(drawing) else []
        for sample in filter(None, drawing):
            sample.drawn += 1
    if work.verify:
        launches.append(VerifyDelivery(work.verify, runner.verify(work.verify), version))
        for sample in work.verify:
            sample.drawn += sample.drafts + 1
    if work.starting:
        launches.append(Delivery(work.starting, runner.first_draws(work.starting), version))
        for sample in work.starting:
            sample.drawn += 1
    for request in {sample.request for sample in work.starting}:
        if not request.context.pages:  # its last sample, or one for want of room, has them
            request.logits_V = request.hidden_C = None
    return launches
