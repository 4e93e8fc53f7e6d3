"""`sparrow worker`: answer the prompts of a run on another machine, which it calls.

    this process  --HTTP-->  run        a session: frames both ways, weights as deltas
         |
    worker process (worker.py): engine, episodes, verifiers

A request that is lost is repeated, for ever; frames come once and in order all the same
(exchange.py), and a download goes on where it was cut. Where the run no longer knows the session,
as it was silent for too long or the run was started again, what it was doing is dropped, and the
worker joins anew.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from sparrow import __version__
from sparrow.dataflow.asynchronous.exchange import FrameBody, FrameExchange, seal, unseal
from sparrow.dataflow.asynchronous.messages import (
    LENGTHS_BYTES,
    GroupEnded,
    Join,
    Joined,
    LoadWeights,
    Open,
    Opened,
    WeightsLoaded,
    WorkerFailed,
    decode_frame,
    encode,
    frame_lengths,
)
from sparrow.dataflow.asynchronous.workers import WorkerProcess
from sparrow.schema.asynchronous import WORKER_KEY, WorkerConfig
from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.schema.types import Report, environment_key

WAIT = 20.0  # seconds that a request waits for messages
TIMEOUT = httpx2.Timeout(WAIT + 20.0, connect=10.0)
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between tries
MOST_REFUSED = 5  # answers in a row that refuse it, before it ends
MOST_CRASHES = 3  # of the worker process in a row, without a group in between
LEAVE = 2.0  # seconds to say goodbye
FILES = ("data.rows", "rollout.attention.schedule")  # settings whose files are fetched

T = TypeVar("T")


class RunEnded(Exception):
    """The run has ended."""


class SessionLost(Exception):
    """The run does not know this session any more."""


class ProcessEnded(Exception):
    """The worker process has ended."""


class WorkerRefused(Exception):
    """The run will not have this worker, or the worker this run, however often it is asked."""


class _Gone(Exception):
    """The version is not kept any more: a newer one will be announced."""


ENDS: dict[str, type[Exception]] = {"ended": RunEnded, "lost": SessionLost, "gone": _Gone}
FINAL = (401, 403, 404, 405, 409, 413)  # statuses of a run that is none, or refuses us


class RunLine:
    """Requests to the run, repeated until they are answered."""

    def __init__(self, http: httpx2.AsyncClient, report: Report) -> None:
        self._http, self._report = http, report
        self._known, self._refused = False, 0  # it has answered once; refusals in a row
        self._problem = ""  # why it does not answer
        self.session = ""

    async def post(self, path: str, content: bytes, read: Callable[[bytes], T], **query: Any) -> T:
        """Send a body; read: what is done with the answer, ValueError if it is damaged."""
        for pause in _pauses():
            try:
                settings: dict[str, Any] = {"content": content, "params": query}
                response = await self._http.post(path, headers=self._headers, **settings)
                if response.status_code == 200:
                    return self._answered(read(response.content))
                problem = self._refusal(response)
            except httpx2.LocalProtocolError as error:
                problem = self._refused_again(f"the request cannot be sent: {error}")
            except (httpx2.RequestError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            await self._pause(problem, pause)
        raise AssertionError("there is no last pause")

    async def fetch(self, path: str, **query: Any) -> bytes | None:
        """Download; after a cut it goes on where it was. None: there is nothing to fetch."""
        data = bytearray()
        for pause in _pauses():
            try:
                place, headers = {**query, "offset": len(data)}, self._headers
                asked = self._http.stream("GET", path, params=place, headers=headers)
                async with asked as response:
                    if response.status_code == 204:
                        return self._answered(None)
                    if response.status_code == 200:
                        async for part in response.aiter_bytes():
                            data += part
                        return self._answered(unseal(bytes(data)))
                    await response.aread()
                    problem = self._refusal(response)
            except httpx2.LocalProtocolError as error:
                problem = self._refused_again(f"the request cannot be sent: {error}")
            except httpx2.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError as error:
                problem = str(error)
                data.clear()
            await self._pause(problem, pause)
        raise AssertionError("there is no last pause")

    async def leave(self) -> None:
        """Give the prompts back, if the run can be reached at once."""
        with suppress(TimeoutError, RunEnded, SessionLost, WorkerRefused):
            await asyncio.wait_for(self.post("leave", b"", unseal), LEAVE)

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-sparrow-session": self.session}

    def _answered(self, answer: T) -> T:
        if self._problem:
            self._report("the run answers again")
        self._problem, self._known, self._refused = "", True, 0
        return answer

    def _refusal(self, response: httpx2.Response) -> str:
        """Why a request is to be repeated; raises where that is of no use."""
        text, code = response.text[:300], ""
        with suppress(ValueError, TypeError, LookupError):
            document = response.json()
            text, code = str(document["error"])[:300], str(document["code"])
        if (kind := ENDS.get(code)) is not None:
            raise kind(text)
        status = response.status_code
        if status in FINAL:
            hint = f"; is {WORKER_KEY} that of the run?" if status == 401 else ""
            self._refused_again(f"the run refuses this worker ({status}): {text}{hint}")
        return f"{status}: {text}"

    def _refused_again(self, problem: str) -> str:
        """Give up; but what once was answered may only be damaged now, and is repeated."""
        self._refused += 1
        if not self._known or self._refused >= MOST_REFUSED:
            raise WorkerRefused(problem)
        return problem

    async def _pause(self, problem: str, seconds: float) -> None:
        """Wait; a problem of another kind than the one before is reported."""
        if problem.split(":")[0] != self._problem:
            self._report(f"no answer, trying again until there is one ({problem})")
        self._problem = problem.split(":")[0]
        await asyncio.sleep(seconds)


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


# A session.


class RunSession:
    """A session of the run, with the worker process that answers its prompts."""

    def __init__(self, line: RunLine, opening: Open, folder: Path, model: str) -> None:
        """model: identity of the run's."""
        self.line, self.groups, self._model = line, 0, model
        self._opening, self._folder = opening, folder
        self._exchange = FrameExchange()
        self._pushed, self._announced, self._loaded = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self._weights: LoadWeights | None = None  # to load
        self._state = WeightsLoaded(version=0, seconds=0.0, tokens=0)  # of the worker process
        self._dtype = self._failed = ""  # failed: why the worker process cannot work

    async def run(self) -> None:
        """Answer prompts until the session ends, by one of the exceptions above."""
        process = WorkerProcess(self._opening, None)
        reader, self._writer = await asyncio.open_connection(sock=process.connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._read(reader), self._send(), self._poll(), self._load()):
                    tasks.create_task(part)
        except BaseExceptionGroup as group:
            if self._failed:  # the run may have closed the session for it
                raise WorkerRefused(self._failed) from None
            raise group.exceptions[0] from None
        finally:
            self._writer.transport.abort()
            process.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Frames of the worker process go to the run."""
        while True:
            try:
                lengths = await reader.readexactly(LENGTHS_BYTES)
                frame = lengths + await reader.readexactly(sum(frame_lengths(lengths)))
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise ProcessEnded("the worker process has ended") from error
            message = decode_frame(frame)
            self._note(message)
            self._push(frame)
            if isinstance(message, WorkerFailed):
                self._failed = message.reason
                await asyncio.sleep(1.0)  # so that the run hears of it
                raise WorkerRefused(message.reason)

    def _note(self, message: Record) -> None:
        match message:
            case Opened():
                if message.model != self._model:
                    raise WorkerRefused(
                        "the model here has another configuration or tokenizer than the run's; "
                        "--model says where another one is"
                    )
                self._dtype = message.dtype
                self._state = self._state.replace(digest=message.digest)
            case WeightsLoaded():
                self._state = message
                self._loaded.set()
            case GroupEnded():
                self.groups += 1

    def _push(self, frame: bytes) -> None:
        self._exchange.push(frame)
        self._pushed.set()

    async def _send(self) -> None:
        while True:
            await self._pushed.wait()
            self._pushed.clear()
            while self._exchange.waiting:
                body = self._exchange.body().pack()
                self._take(await self.line.post("exchange", body, FrameBody.unpack))

    async def _poll(self) -> None:
        while True:
            body = self._exchange.body(frames=False).pack()
            answer = await self.line.post("exchange", body, FrameBody.unpack, wait=WAIT)
            for frame in self._take(answer):
                message = decode_frame(frame)
                if isinstance(message, LoadWeights):
                    self._weights = message
                    self._announced.set()
                else:
                    await self._tell(frame)

    def _take(self, body: FrameBody) -> tuple[bytes, ...]:
        try:
            return tuple(self._exchange.accept(body))
        except ValueError as error:
            raise SessionLost(str(error)) from error

    async def _tell(self, frame: bytes) -> None:
        """Send a frame to the worker process."""
        self._writer.write(frame)
        with suppress(ConnectionError):  # `_read` sees it too
            await self._writer.drain()

    async def _load(self) -> None:
        """Fetch the versions that are announced, the latest each time."""
        while True:
            await self._announced.wait()
            self._announced.clear()
            assert self._weights is not None
            wanted, have, begun = self._weights, self._state, time.monotonic()
            state = {"have": have.version, "digest": have.digest, "dtype": self._dtype}
            try:
                data = await self.line.fetch("weights", version=wanted.version, **state)
            except _Gone:  # a newer one will be announced
                await asyncio.sleep(LONGEST_PAUSE / 10)
                self._announced.set()
                continue
            if data is None:  # the worker has it
                seconds = time.monotonic() - begun
                self._push(encode(have.replace(seconds=seconds, tokens=0)))
                continue
            file = self._folder / f"{wanted.version}.delta"
            await asyncio.to_thread(file.write_bytes, data)
            self._loaded.clear()
            await self._tell(encode(wanted.replace(file=str(file), delta=True)))
            await self._loaded.wait()


# From the configuration of the command line.


async def answer_prompts(config: WorkerConfig, report: Report) -> bool:
    """Work for a run until it has ended; False: it was interrupted."""
    key = environment_key(WORKER_KEY)
    if not key:
        raise ValueError(
            f"{WORKER_KEY} is not set: the key of the run, from its environment or "
            "the file worker_key in its folder"
        )
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    headers = {"authorization": f"Bearer {key}", "accept-encoding": "identity"}
    address = f"{config.connect.rstrip('/')}/worker/"
    async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=TIMEOUT) as http:
        line = RunLine(http, report)
        try:
            await _work(config, line, report)
        except RunEnded:
            report("the run has ended")
        except (WorkerRefused, httpx2.InvalidURL) as error:
            raise ValueError(str(error)) from error
        except asyncio.CancelledError:
            return False
    return True


async def _work(config: WorkerConfig, line: RunLine, report: Report) -> None:
    """Work in one session after the other."""
    crashes = 0
    while crashes < MOST_CRASHES:
        joined = await _join(config, line)
        report(f"joined as {joined.name}")
        try:
            crashes = await _session(config, line, joined, crashes, report)
        except SessionLost as error:
            report(f"{error}; joining again")
        except (WorkerRefused, ValueError, OSError, asyncio.CancelledError):
            await line.leave()
            raise
        await asyncio.sleep(FIRST_PAUSE)
    raise WorkerRefused(f"the worker process ended {crashes} times in a row before its first group")


async def _session(
    config: WorkerConfig, line: RunLine, joined: Joined, crashes: int, report: Report
) -> int:
    """Work in a session; crashes in a row when its process has ended."""
    with tempfile.TemporaryDirectory(prefix="sparrow-") as folder:
        opening = await _opening(config, line, joined, Path(folder))
        session = RunSession(line, opening, Path(folder), joined.model)
        try:
            await session.run()
        except ProcessEnded as error:
            report(f"{error}; it is started again")
            await line.leave()
        return 1 if session.groups else crashes + 1


async def _join(config: WorkerConfig, line: RunLine) -> Joined:
    line.session = ""
    join = Join(
        name=config.name or f"{socket.gethostname()}-{os.getpid()}",
        sparrow=__version__,
    )
    content = seal(json.dumps(to_dict(join)).encode())
    joined = from_dict(Joined, json.loads(await line.post("open", content, unseal)))
    line.session = joined.session
    return joined


async def _opening(config: WorkerConfig, line: RunLine, joined: Joined, folder: Path) -> Open:
    """The first message to the worker process: the run's configuration, changed for this place."""
    settings = json.loads(TrainConfig.model_validate_json(joined.config).model_dump_json())
    for key in set(FILES) & set(joined.files):
        *sections, name = key.split(".")
        table = _table(settings, sections)
        if not isinstance(table[name], str):
            continue
        file = folder / f"{key}{Path(table[name]).suffix}"
        file.write_bytes(await line.fetch("file", key=key) or b"")
        table[name] = str(file)
    changed = TrainConfig.model_validate_json(json.dumps(_changed(settings, config)))
    _refuse_code(changed, config)
    return Open(
        role="rollout",
        config=changed.model_dump_json(),
        path=tuple(sys.path),
        threads=config.threads,
        remote=True,
        own_decoding=config.own_decoding,
    )


def _table(settings: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    for section in sections:
        settings = settings[section]
    return settings


def _changed(settings: dict[str, Any], config: WorkerConfig) -> dict[str, Any]:
    """Settings of the run with those of this worker; held-out rows are answered elsewhere."""
    model, rollout = settings["model"], settings["rollout"]
    given = {"name": config.model, "device": config.device, "dtype": config.dtype}
    model |= {name: value for name, value in given.items() if value is not None}
    limits = {name: getattr(config, name) for name in ("decoding", "max_running", "kv_gib")}
    rollout |= {name: value for name, value in limits.items() if value is not None}
    if config.budget is not None or config.schedule is not None:
        rollout["attention"] |= {"budget": config.budget, "schedule": config.schedule}
    rollout |= {"url": [], "fixed_weights": False}  # the worker has an engine of its own
    settings["validation"]["every"] = 0
    return settings


def _refuse_code(settings: TrainConfig, config: WorkerConfig) -> None:
    named = {k: text for k, text in code_settings(settings).items() if not k.startswith("dispatch")}
    if named and not config.allow_code:
        listed = ", ".join(f"{key} = {text!r}" for key, text in named.items())
        raise WorkerRefused(
            f"the run's configuration names code ({listed}), which is not imported without "
            "--allow-code: use it only for runs that you trust"
        )
