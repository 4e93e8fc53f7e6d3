"""Rollouts by servers: `rollout.url` names one or several that speak OpenAI's protocol.

A server of ours (`sparrow serve --admin-port`) gets every version of the weights, as a delta from
the one that it has; one that was restarted, or missed a version, gets the whole. Every answer is
checked to be of the weights that the server should have. Other servers keep their weights, which
`rollout.fixed_weights` must allow.

A prompt goes to the server with the fewest samples in flight, one that begins like an earlier one
to the same server, which has its keys and values. A server that does not answer is left out for a
while, and its prompts go to others: with the same seed, so on a CPU with the same tokens. Of
several answers to one request only the one that arrived is used.
"""

import asyncio
import random
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx2
from safetensors.torch import save as save_safetensors
from torch import Tensor

from sparrow.client import AsyncClient, Client, ClientError, Options
from sparrow.dataflow.backend import RolloutBackend, Sampler
from sparrow.files import http_digest
from sparrow.models.deltas import Delta, digest, smallest
from sparrow.models.lora import Adapter
from sparrow.schema.base import to_dict
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.serve import ADMIN_KEY, DAMAGED, DIGEST, KEY
from sparrow.schema.types import InFlight, environment_key
from sparrow.training.world import World

ATTEMPTS = 16  # of a request, before its episode fails
PATIENCE = 600.0  # seconds without a server that has the present weights, likewise
WAIT = (0.5, 30.0)  # seconds before a server is tried again: at first, at most
AWAY = (None, 429, 500, 502, 503, 504)  # statuses that may pass; None: there was no answer
USUAL = 256  # samples that a server takes which does not say
PREFIX = 64  # tokens by which prompts begin alike
MOST_PREFIXES = 4096
MOST_IDS = 64
HEALTH_SECONDS = 30.0  # between looks at a server that has not answered yet
SEND_SECONDS = 600.0  # for a version of the weights

T = TypeVar("T")
Report = Callable[[str], None]


class ServerError(ValueError):
    """Raised where a server could not be reached, or refused what it was sent."""


class WeightsState(NamedTuple):
    """A version of the weights, with its digest."""

    version: int
    digest: int


class PublishedWeights:
    """The weights that servers of one dtype should have, and how they get them."""

    def __init__(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.weights = dict(weights)
        self.held, self.base = WeightsState(version, digest(self.weights)), WeightsState(-1, 0)
        self._update = self._whole = b""

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Go on to a later version, given in any dtype."""
        dtype = next(iter(self.weights.values())).dtype
        new = {name: weights[name].detach().to(dtype, copy=True) for name in self.weights}
        old = {name: weight.to(new[name].device) for name, weight in self.weights.items()}
        base, known = self.held, {"base_version": self.held.version, "version": version}
        delta = Delta.between(old, new, **known, base_digest=base.digest)
        self.weights, self.base, self.held = new, base, WeightsState(version, delta.digest)
        self._update, self._whole = smallest(delta, new), b""

    def message(self, held: WeightsState | None) -> bytes:
        """Bytes that lead a server from what it has to these weights."""
        if held == self.base and self._update:
            return self._update
        self._whole = self._whole or Delta.whole(self.weights, version=self.held.version).encode()
        return self._whole


class RolloutServer:
    """One server as a trainer sees it."""

    def __init__(self, url: str, *, sends: bool) -> None:
        """Ask the server what it is; ServerError if it cannot be used. sends: weights."""
        self.url, self.load, self.failures, self.paused = url.rstrip("/"), 0, 0, 0.0
        self.held: WeightsState | None = None  # its weights, where they are known
        self.ids: deque[str] = deque(maxlen=MOST_IDS)  # of loads of its weights that were right
        try:
            with self.client() as client:
                self.about = client.capabilities()
                model = next(m for m in client.models() if str(m.get("id")) == self.about.model)
        except ClientError as error:
            hint = "" if self.url.endswith("/v1") else "; does the URL end in /v1?"
            raise ServerError(f"{self.url}: {error}{hint}") from error
        if not (self.about.token_ids and self.about.logprobs):
            raise ServerError(f"{self.url}: {'; '.join(self.about.notes)}")
        own = model.get("sparrow") or {}
        self.is_sparrow, self.capacity = bool(own), own.get("max_samples")
        self.rule, self.identity = own.get("rule"), own.get("model")
        self.max_context = model.get("max_model_len")
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        self._admin = f"{parts.scheme}://{host}:{own.get('admin_port')}/admin"
        if sends and own.get("admin_port") is None:
            raise ServerError(
                f"{self.url} has no admin port, so it cannot get weights: start it by `sparrow "
                "serve --admin-port`, or set rollout.fixed_weights"
            )
        self.dtype = self.status()["dtype"] if sends else ""

    def client(self) -> Client:
        return Client(self.url, environment_key(KEY), retries=2)

    def async_client(self) -> AsyncClient:
        key = environment_key(KEY)
        return AsyncClient(self.url, key, self.about.model, timeout=None, retries=0)

    def describe(self) -> str:
        return ", ".join(filter(None, (self.url, self.about.server, self.about.model, self.dtype)))

    # Availability.

    def takes(self, samples: int) -> bool:
        """Whether it is there and has room."""
        room = self.capacity is None or self.load + samples <= self.capacity or not self.load
        return room and time.monotonic() >= self.paused

    def pause(self) -> None:
        """Leave it out for a while, longer each time."""
        self.failures += 1
        first, most = WAIT
        wait = min(most, first * 2 ** min(self.failures - 1, 10)) * random.uniform(0.5, 1)
        self.paused = time.monotonic() + wait

    # The admin port.

    def status(self) -> dict[str, Any]:
        return self._send("GET", "status")

    def refresh(self) -> str:
        """Ask which weights it has; return the name of their load."""
        status = self.status()
        known = status["digest"] is not None
        self.held = WeightsState(status["version"], int(status["digest"], 16)) if known else None
        return str(status["weights_id"])

    def load_weights(self, published: PublishedWeights, in_flight: InFlight, report: Report) -> int:
        """Bring it to these weights, whole if need be; the tokens that samples in flight had."""
        tokens = 0
        if self.held == published.base:
            try:
                tokens = self._load(published.message(self.held), in_flight=in_flight)
            except ServerError as error:  # it was restarted, or its answer was lost
                report(f"{error}; it gets the whole version, unless it has it")
        self.held = None
        found = self.refresh()
        if self.held == published.held:
            self.ids.append(found)
        else:
            tokens = self._load(published.message(None), reset="true")
            self.held = published.held
        self.failures, self.paused = 0, 0.0
        return tokens

    def _load(self, message: bytes, **query: str) -> int:
        name = secrets.token_hex(8)
        self.ids.append(name)  # before an answer can have it
        found = self._send("POST", "weights", {**query, "id": name}, message)
        return int(found["tokens_in_flight"])

    def load_adapter(self, adapter: Adapter | None) -> None:
        """Set or remove the adapter of sparse decoding."""
        if adapter is None:
            self._send("POST", "adapter")
            return
        tensors = {name: t.detach().cpu().contiguous() for name, t in adapter.tensors().items()}
        query = {"alpha": repr(float(adapter.alpha)), "rslora": str(adapter.rslora).lower()}
        self._send("POST", "adapter", query, save_safetensors(tensors))

    def _send(
        self, method: str, what: str, query: Mapping[str, str] | None = None, body: bytes = b""
    ) -> dict[str, Any]:
        key = environment_key(ADMIN_KEY)
        if key is None:
            raise ServerError(f"{ADMIN_KEY} is not set: the key of the admin port of {self.url}")
        headers = {"Authorization": f"Bearer {key}", DIGEST: http_digest(body)}
        url = f"{self._admin}/{what}"
        try:
            response = httpx2.request(
                method, url, params=query, content=body, headers=headers, timeout=SEND_SECONDS
            )
            data = response.json()
        except (httpx2.TransportError, httpx2.InvalidURL, ValueError) as error:
            raise ServerError(f"{url}: {error!r}") from error
        if not response.is_success:
            hint = f" (the key is that of {ADMIN_KEY})" if response.status_code == 401 else ""
            raise ServerError(f"{url}: {data.get('error', {}).get('message')}{hint}")
        return dict(data)


class ServerBackend(RolloutBackend):
    """Servers that answer prompts, and get the learner's weights between rollouts or during them.

    starts: makes the weights that a run starts from in a dtype; None: servers keep their own. Of
    several ranks the first sends. check: refuses servers by a ValueError, before any is changed.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        starts: Callable[[str], Mapping[str, Tensor]] | None,
        check: Callable[[RolloutServer], None] = lambda server: None,
        world: World | None = None,
        report: Report = print,
    ) -> None:
        self.sends, self.report, self.world = starts is not None, report, world or World()
        self.servers = [RolloutServer(url, sends=self.sends) for url in urls]
        for server in self.servers:
            check(server)
        lengths = [s.max_context for s in self.servers if s.max_context is not None]
        self.max_context: int = min(lengths, default=2**31)
        self.max_running = sum(server.capacity or USUAL for server in self.servers)
        self.version = 0
        self.adapter: Adapter | None = None
        self.wanted: dict[str, WeightsState] = {}  # weights that servers should have, by dtype
        self._published: dict[str, PublishedWeights] = {}  # of the first rank
        self._sending = threading.Lock()
        if starts is None:
            return

        def open_weights() -> int:
            for dtype in sorted({server.dtype for server in self.servers}):
                self._published[dtype] = PublishedWeights(starts(dtype), 0)
            for server in self.servers:
                server.refresh()
            tokens = self._load_all("recompute")
            if not any(server.held for server in self.servers):
                raise ServerError("no server took the weights; see above")
            return tokens

        self._on_first_rank(open_weights)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Sampler]:
        async with AsyncExitStack() as opened:
            pairs = [(s, await opened.enter_async_context(s.async_client())) for s in self.servers]
            sampler = ServerSampler(self, pairs)
            try:
                yield sampler
            finally:
                await sampler.close()

    def sync_weights(
        self, weights: Mapping[str, Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        self.publish(weights, version, "recompute")
        self.set_actor(adapter)

    def publish(self, weights: Mapping[str, Tensor], version: int, in_flight: InFlight) -> int:
        """Send a version to all servers at once; the tokens that samples in flight had."""
        if not self.sends:
            return 0

        def send() -> int:
            with self._sending:
                for published in self._published.values():
                    published.publish(weights, version)
                self.version = version
                return self._load_all(in_flight)

        tokens, self.version = self._on_first_rank(send), version
        return tokens

    def _on_first_rank(self, work: Callable[[], int]) -> int:
        """Do it on the first rank; all learn what servers have and should have."""

        def there() -> tuple[int, dict[str, WeightsState], list[Any]]:
            tokens = work()
            wanted = {dtype: part.held for dtype, part in self._published.items()}
            return tokens, wanted, [(server.held, server.ids) for server in self.servers]

        tokens, self.wanted, states = self.world.on_first_rank(there, (ServerError,))
        for server, (held, ids) in zip(self.servers, states, strict=True):
            server.held, server.ids = held, ids
        return tokens

    def _load_all(self, in_flight: InFlight) -> int:
        """Servers that do not take them are brought up to date when they are back."""

        def load(server: RolloutServer) -> int | ServerError:
            try:
                published = self._published[server.dtype]
                return server.load_weights(published, in_flight, self.report)
            except ServerError as error:
                server.held = None
                server.pause()
                return error

        with ThreadPoolExecutor(len(self.servers)) as threads:
            found = list(threads.map(load, self.servers))
        for error in [part for part in found if isinstance(part, ServerError)]:
            self.report(f"version {self.version} was not loaded: {error}")
        return sum(part for part in found if not isinstance(part, ServerError))

    def is_current(self, server: RolloutServer) -> bool:
        """Whether a server has the weights that it should have."""
        return not self.sends or server.held == self.wanted.get(server.dtype)

    def resync(self, server: RolloutServer) -> None:
        """Bring a server that was away to the present weights."""
        if not self.world.is_first:
            return
        with self._sending:
            published = self._published[server.dtype]
            if server.held == published.held:  # meanwhile
                return
            try:
                server.load_weights(published, "recompute", self.report)
                if self.adapter is not None:
                    server.load_adapter(self.adapter)
                self.report(f"{server.url} is back, with version {self.version}")
            except ServerError as error:
                server.held = None
                self.mark_unavailable(server, str(error))

    def mark_unavailable(self, server: RolloutServer, reason: str) -> None:
        """Pause a server, and say so the first time."""
        if not server.failures:
            self.report(f"{reason}; it is left out until it answers again")
        server.pause()

    def set_actor(self, adapter: Adapter | None) -> None:
        if adapter is None and self.adapter is None:
            return
        self.adapter = adapter
        for server in self.servers if self.world.is_first else ():
            try:
                server.load_adapter(adapter)
            except ServerError as error:
                self.report(f"the adapter was not loaded: {error}")
                server.held = None

    def sleep(self) -> None:
        """Servers have memory of their own."""

    def wake(self) -> None:
        """Servers did not sleep."""

    def header(self) -> str:
        return "servers " + "; ".join(server.describe() for server in self.servers)


class ServerSampler(Sampler):
    """Samples answers by servers, within one event loop."""

    def __init__(
        self, backend: ServerBackend, pairs: Sequence[tuple[RolloutServer, AsyncClient]]
    ) -> None:
        self.backend, self._clients = backend, dict(pairs)
        self._freed = asyncio.Condition()
        self._resyncing: dict[RolloutServer, asyncio.Task[None]] = {}
        self._homes: OrderedDict[tuple[int, ...], RolloutServer] = OrderedDict()

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        schedule: Schedule | None = None,
        speculative: SpeculativeParams | None = None,
        options: OutputOptions | None = None,
    ) -> list[Completion]:
        failure = ""
        for _ in range(ATTEMPTS):
            server = await self._acquire(prompt, params.n)
            held, client = server.held, self._clients[server]
            asked = request_options(schedule, speculative, options, ours=server.is_sparrow)
            try:
                completions = await _while_healthy(client, client.complete(prompt, params, **asked))
            except ClientError as error:
                failure = f"{server.url}: {error}"
                if error.status not in AWAY and error.code != DAMAGED:
                    raise ValueError(failure) from error
                self.backend.mark_unavailable(server, failure)
            else:
                failure = self._wrong_weights(server, held, completions)
                if not failure:
                    server.failures = 0
                    return completions
                server.held = None
                self.backend.report(failure)
            finally:
                await self._release(server, params.n)
        raise ValueError(f"{ATTEMPTS} attempts failed, the last: {failure}")

    def _wrong_weights(
        self, server: RolloutServer, held: WeightsState | None, completions: Sequence[Completion]
    ) -> str:
        """Why answers are not of the weights that the server was sent."""
        if not self.backend.sends:
            return ""
        least = -1 if held is None else held.version
        for completion in completions:
            if completion.weights_id not in server.ids:
                return f"{server.url} answered with weights that this run has not sent it"
            versions = completion.weight_versions
            if len(versions) and not least <= versions.min() <= versions.max() <= self.version:
                return (
                    f"{server.url} answered with weights of version {versions.min()} to "
                    f"{versions.max()}, not {least} to {self.version}: was it restarted?"
                )
        return ""

    @property
    def version(self) -> int:
        return self.backend.version

    async def update(
        self, items: Mapping[str, Tensor], *, version: int, in_flight: InFlight
    ) -> int:
        return await asyncio.to_thread(self.backend.publish, items, version, in_flight)

    async def close(self) -> None:
        await asyncio.gather(*self._resyncing.values(), return_exceptions=True)

    # Routing.

    async def _acquire(self, prompt: Sequence[int], samples: int) -> RolloutServer:
        """Wait for a server with room; count the samples as in flight."""
        key, since = tuple(prompt[:PREFIX]), time.monotonic()
        async with self._freed:
            while (server := self._choose(key, samples)) is None:
                now = time.monotonic()
                since = now if any(map(self.backend.is_current, self._clients)) else since
                if now - since > PATIENCE:
                    raise ValueError(f"no server has had the present weights for {PATIENCE:g} s")
                with suppress(TimeoutError):  # one that was paused may be back
                    await asyncio.wait_for(self._freed.wait(), WAIT[0])
            server.load += samples
        self._homes[key] = server
        self._homes.move_to_end(key)
        if len(self._homes) > MOST_PREFIXES:
            self._homes.popitem(last=False)
        return server

    async def _release(self, server: RolloutServer, samples: int) -> None:
        async with self._freed:
            server.load -= samples
            self._freed.notify_all()

    def _choose(self, key: tuple[int, ...], samples: int) -> RolloutServer | None:
        """The server of prompts that begin so, unless others have far less to do."""
        current = filter(self.backend.is_current, self._clients)
        ready = [server for server in current if server.takes(samples)]
        if len(ready) < len(self._clients):
            self._resync_stale()
        if not ready:
            return None
        least = min(ready, key=lambda server: server.load)
        home = self._homes.get(key)
        near = home in ready and home is not None and home.load <= 2 * least.load + samples
        return home if near else least

    def _resync_stale(self) -> None:
        """Begin to bring back servers that have other weights than they should."""
        for server in self._clients:
            stale = not self.backend.is_current(server) and time.monotonic() >= server.paused
            if stale and (server not in self._resyncing or self._resyncing[server].done()):
                resync = asyncio.to_thread(self.backend.resync, server)
                self._resyncing[server] = asyncio.create_task(resync)


def request_options(
    schedule: Schedule | None,
    speculative: SpeculativeParams | None,
    options: OutputOptions | None,
    *,
    ours: bool,
) -> Options:
    """How a server is asked to decode; hidden states only of ours: others return none."""
    if schedule is None:
        asked: Options = {"decoding": "dense"}
    else:
        asked = {"decoding": "sparse", "schedule": to_dict(schedule)}
    if speculative is not None:
        asked["decoding"] = "exact"
        asked["draft_tokens"] = speculative.draft_tokens
        asked["acceptance"] = speculative.acceptance
        asked["reselect"] = speculative.reselect
    if options is not None and options.hidden_states and ours:
        asked["hidden_states"] = True
    return asked


async def _while_healthy(client: AsyncClient, work: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer as long as the server is there, however long that takes."""
    task, missed = asyncio.ensure_future(work), 0
    try:
        while not (await asyncio.wait({task}, timeout=HEALTH_SECONDS))[0]:
            # By a connection of its own: those of the client may all wait for answers.
            async with AsyncClient(client.base_url, timeout=HEALTH_SECONDS) as other:
                missed = 0 if await other.health() else missed + 1
            if missed == 2 and not task.done():
                raise ClientError(f"{client.base_url} no longer answers")
        return task.result()
    finally:
        task.cancel()
