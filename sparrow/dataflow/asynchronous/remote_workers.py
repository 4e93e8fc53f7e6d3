"""Where workers of other machines connect: a small HTTP server beside the learner.

    POST /worker/open       Join -> Joined: a session, and the run's configuration
    POST /worker/exchange   frames of messages both ways; ?wait=S: wait for some, at most so long
    POST /worker/leave      its prompts are dispatched again
    GET  /worker/weights    ?version, have, digest, dtype, offset -> a delta, or a whole version
    GET  /worker/file       ?key -> a file that the configuration names

Every request has the key of the run. Workers call out and nobody calls them. Nothing is unpickled.
TLS is the matter of a reverse proxy.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparrow import __version__
from sparrow.dataflow.asynchronous.exchange import MOST_BODY, FrameBody, FrameExchange, seal, unseal
from sparrow.dataflow.asynchronous.messages import Join, Joined, Role, decode_frame, encode
from sparrow.dataflow.asynchronous.weight_versions import VersionGone, WeightVersions
from sparrow.dataflow.asynchronous.workers import RemoteLink, WorkerLost
from sparrow.files import expanded
from sparrow.schema.asynchronous import WORKER_KEY
from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.simulation import listening_address
from sparrow.schema.train import TrainConfig
from sparrow.schema.types import environment_key

KEY_FILE = "worker_key"
SMALL = 2**16  # bytes of a body without frames
MOST_SESSIONS = 256
MOST_INBOX = 256  # frames of a worker that wait
LONGEST_WAIT = 20.0  # seconds of a request
FAREWELL = 5.0  # seconds in which workers hear that the run has ended
SESSION = "x-sparrow-session"

OnJoin = Callable[[RemoteLink, str], str]  # a worker and its name -> the name that it gets
Handler = Callable[[Request], Awaitable[Response]]


class RequestRefused(Exception):
    """Raised for a request that gets this status."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class RemoteSession:
    """A worker on another machine, as the coordinator sees it, and its side of the exchange."""

    role: Role = "rollout"

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self.heard = time.monotonic()
        self.connection, self._signal = socket.socketpair()  # readable while the inbox has frames
        self.exchange = FrameExchange()
        self.closed = False
        self._inbox: deque[bytes | None] = deque()  # None: the worker has left
        self._lock = threading.Lock()
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

    # Called by the coordinator.

    def send(self, message: Record) -> None:
        if self.closed:
            raise WorkerLost("its session has ended")
        self.exchange.push(encode(message))
        self.wake()

    def receive(self) -> Record:
        with self._lock:
            frame = self._inbox.popleft()
            if not self._inbox:
                self.connection.recv(1)
        if frame is None:
            raise WorkerLost("it left")
        return decode_frame(frame)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self.connection.close()
            self._signal.close()
        self.wake()

    def wake(self) -> None:
        """Answer a request that waits for frames."""
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    # Called by the server.

    def put(self, frame: bytes | None) -> None:
        with self._lock:
            if self.closed:
                return
            if not self._inbox:
                self._signal.send(b"x")
            self._inbox.append(frame)

    @property
    def inbox(self) -> int:
        """Frames that the coordinator has not read."""
        return len(self._inbox)

    async def wait(self, seconds: float) -> None:
        """Wait until there are frames for the worker, or the session ends."""
        self._changed.clear()
        if not self.exchange.waiting and not self.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)


class RemoteWorkers:
    """The server, in a thread of its own."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        versions: WeightVersions,
        join: OnJoin,
        *,
        model: str = "",
    ) -> None:
        """model: its identity, which that of a worker must have."""
        assert config.dispatch.listen is not None
        self._config, self._versions, self._join = config, versions, join
        self._key = worker_key(folder).encode()
        self._sessions: dict[str, RemoteSession] = {}
        self._files = {name: file for name, file in _named_files(config).items() if file.is_file()}
        self._ended, self._told, self._model = False, set[str](), model
        self._stopping = False
        self._longest_wait = min(LONGEST_WAIT, config.dispatch.worker_timeout / 3)
        host, port = listening_address(config.dispatch.listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._listener.getsockname()[1]}"
        settings = uvicorn.Config(
            self._app(),
            ws="none",
            proxy_headers=False,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="sparrow-workers", daemon=True
        )
        self._thread.start()

    def close(self, *, ended: bool) -> None:
        """Stop listening. ended: workers hear that the run has ended, otherwise they try again."""
        self._ended, self._stopping = ended, True
        until = time.monotonic() + (FAREWELL if ended else 0.2)
        live = {name for name, session in [*self._sessions.items()] if not session.closed}
        while live - self._told and time.monotonic() < until:
            for name in live:
                self._sessions[name].wake()
            time.sleep(0.05)
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def _app(self) -> Starlette:
        posts = {"open": self._open, "exchange": self._exchange, "leave": self._leave}
        gets = {"weights": self._weights, "file": self._file}
        routes = [
            Route(f"/worker/{name}", self._guarded(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for name, handler in handlers.items()
        ]
        return Starlette(routes=routes)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                self._refuse_ended(request)
                return await handler(request)
            except RequestRefused as error:
                problem = {"error": str(error), "code": error.code}
                return JSONResponse(problem, status_code=error.status)
            except (ValueError, RecursionError, OverflowError) as error:
                return JSONResponse({"error": str(error), "code": "invalid"}, status_code=400)

        return guarded

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._key):
            raise RequestRefused(401, "the key is wrong or missing", "key")

    def _refuse_ended(self, request: Request) -> None:
        if not self._stopping:
            return
        self._told.add(request.headers.get(SESSION, ""))
        if self._ended:
            raise RequestRefused(410, "the run has ended", "ended")
        raise RequestRefused(503, "the run is stopping", "stopping")

    def _session(self, request: Request) -> RemoteSession:
        session = self._sessions.get(request.headers.get(SESSION, ""))
        if session is None or session.closed:
            raise RequestRefused(410, "the session is unknown or was lost", "lost")
        session.heard = time.monotonic()
        return session

    async def _open(self, request: Request) -> Response:
        join = from_dict(Join, json.loads(unseal(await _read(request, SMALL))))
        if join.sparrow != __version__:
            reason = f"the run has sparrow {__version__}, the worker {join.sparrow!r:.20}"
            raise RequestRefused(409, reason, "version")
        self._sessions = {k: s for k, s in self._sessions.items() if not s.closed}
        if len(self._sessions) >= MOST_SESSIONS:
            raise RequestRefused(503, "too many workers", "many")
        session = RemoteSession()
        self._sessions[session.name] = session
        try:
            name = await asyncio.to_thread(self._join, session, join.name)
        except ValueError as error:
            session.close()
            raise RequestRefused(503, str(error), "stopping") from error
        answer = Joined(
            session=session.name,
            name=name,
            config=self._config.model_dump_json(),
            files=tuple(self._files),
            model=self._model,
        )
        return _bytes(seal(json.dumps(to_dict(answer)).encode()))

    async def _exchange(self, request: Request) -> Response:
        session = self._session(request)
        if session.inbox > MOST_INBOX:
            raise RequestRefused(503, "the run has not read earlier messages yet", "busy")
        wait = min(self._longest_wait, float(request.query_params.get("wait", 0)))
        for frame in session.exchange.accept(FrameBody.unpack(await _read(request, MOST_BODY))):
            session.put(frame)
        if wait > 0:
            await session.wait(wait)
            self._refuse_ended(request)
            self._session(request)
        return _bytes(session.exchange.body(frames=wait > 0).pack())

    async def _leave(self, request: Request) -> Response:
        self._session(request).put(None)
        return _bytes(seal(b""))

    async def _weights(self, request: Request) -> Response:
        self._session(request)
        query = request.query_params
        version, have, offset = (int(query.get(name, 0)) for name in ("version", "have", "offset"))
        known, dtype = query.get("digest", ""), query.get("dtype", "")
        encoded = partial(self._versions.encoded, version, have=have, known=known, dtype=dtype)
        try:
            data = await asyncio.to_thread(encoded)
        except VersionGone as error:
            raise RequestRefused(410, str(error), "gone") from error
        return _bytes(data[max(0, offset) :]) if data else Response(status_code=204)

    async def _file(self, request: Request) -> Response:
        self._session(request)
        file = self._files.get(request.query_params.get("key", ""))
        if file is None:
            raise RequestRefused(404, "the configuration names no such file", "file")
        offset = max(0, int(request.query_params.get("offset", 0)))
        return _bytes(seal(await asyncio.to_thread(file.read_bytes))[offset:])


def worker_key(folder: Path) -> str:
    """The key of the run's workers: of the environment, otherwise a random one in its folder."""
    if key := environment_key(WORKER_KEY):
        return key
    file = folder / KEY_FILE
    with suppress(FileExistsError):
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{secrets.token_urlsafe(32)}\n")
    key = file.read_text(encoding="ascii").strip()
    if len(key) < 16:
        raise ValueError(f"{file}: expected a key of 16 characters or more; remove the file")
    return key


def _named_files(config: TrainConfig) -> dict[str, Path]:
    """Files that the rollout side reads, by setting."""
    named = {
        "data.rows": config.data.rows,
        "rollout.attention.schedule": config.rollout.attention.schedule,
    }  # as FILES of worker_client.py
    return {name: expanded(text) for name, text in named.items() if text is not None}


async def _read(request: Request, most: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestRefused(413, f"a body of more than {most} bytes", "large")
    return bytes(data)


def _bytes(data: bytes) -> Response:
    return Response(data, media_type="application/octet-stream")
