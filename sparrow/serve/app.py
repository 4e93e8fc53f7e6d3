"""The HTTP layer of the server: routes, keys, limits, error objects, server-sent events."""

import asyncio
import gc
import hmac
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparrow import __version__
from sparrow.files import http_digest
from sparrow.models import model_identity
from sparrow.schema.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    parse_request,
)
from sparrow.schema.serve import DAMAGED, DIGEST
from sparrow.serve import responses
from sparrow.serve.answers import Answers, ChatAnswers, TextAnswers
from sparrow.serve.openapi import BODIES, OPEN_ROUTES, describe
from sparrow.serve.responses import Json
from sparrow.serve.sampling import Failed, Overloaded
from sparrow.serve.service import Service

LOG = logging.getLogger("sparrow.serve")
MIB = 2**20
SMALL = 4096  # bytes of a body that is read at once, not in a thread
RETRY_AFTER = 1  # seconds
SWITCH = 0.0005  # seconds until a thread that computes lets another one in; Python's: 0.005
GARBAGE = 20_000  # objects until the youngest are collected; Python's: 700
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
INVALID, OVERLOADED = "invalid_request_error", "rate_limit_error"
ENCODER = json.JSONEncoder(ensure_ascii=False)
KINDS = {401: "authentication_error", 404: "not_found_error", 429: OVERLOADED}


class HttpError(Exception):
    """Raised for a request that gets an error object with this status."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Disconnected(Exception):
    """Raised where the client has left before its answer was there."""


def make_app(service: Service) -> FastAPI:
    """The app over a service, whose engine runs while the app does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with _undisturbed():
            async with service.rollouts:
                yield

    # FastAPI's own routes take a third of a millisecond more, and read bodies of any size.
    answering = [
        Route(path, partial(_answer, service, kind), methods=["POST"])
        for path, kind in BODIES.items()
    ]
    app = FastAPI(
        title="sparrow serve", version=__version__, lifespan=lifespan, routes=[*answering]
    )
    app.add_middleware(RequestMiddleware, service=service, key=service.config.key)
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(HttpError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_routes(app, service)
    app.openapi = cache(partial(describe, app, service))  # type: ignore[method-assign]
    return app


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let neither garbage collection nor the event loop hold up the engine's thread for long.

    A full collection looks at all objects there are, those of the libraries too: several tenths of
    a second. What is there when the server starts is left out.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH)
    gc.set_threshold(GARBAGE, *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        if service.ready:
            return JSONResponse({"status": "ready"})
        text = "The server is starting or shutting down, sleeps, has no weights or has failed."
        return error_response(503, text, "not_ready")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        _check_model(service, name)
        return _model(service)

    @app.post("/v1/responses", include_in_schema=False)
    async def unsupported() -> Response:
        text = "/v1/responses is not supported, use /v1/chat/completions."
        return error_response(400, text, "unsupported_endpoint")


def _model(service: Service) -> Json:
    about = {"id": service.name, "object": "model", "created": service.created}
    about |= {"owned_by": "sparrow", "max_model_len": service.engine.max_context}
    rule, own = service.engine.rule, service.decoding
    own_schedule = None if own.schedule is None else own.schedule.name
    about["sparrow"] = {
        "version": service.engine.version,
        "decoding": own.describe(),
        "schedule": own_schedule,
        "rule": None if rule is None else rule.describe(),
        "admin_port": service.admin_port,
        "max_samples": service.sampler.most,
        "model": model_identity(service.engine.model),
    }
    return about


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        text = f"The model {name!r:.80} does not exist; this server has {service.name!r}."
        raise HttpError(404, text, "model_not_found", "model")


# Requests.


async def _answer(service: Service, kind: type[GenerationRequest], request: Request) -> Response:
    """Answer a request, whole or streamed."""
    loop = asyncio.get_running_loop()
    try:
        body = await read_body(request, service.config.max_body_mib * MIB)
        if len(body) <= SMALL:
            answers = _prepare(service, kind, body)
        else:
            answers = await loop.run_in_executor(service.reading, _prepare, service, kind, body)
        if not answers.request.stream:
            response = JSONResponse(await _unless_gone(request, answers.whole()))
            if DIGEST in request.headers:
                response.headers[DIGEST] = http_digest(bytes(response.body))
            return response
        events = _events(service, answers)
        first = await anext(events)  # errors until here have a status of their own
    except Overloaded:
        text = "The server has no room for more requests, try again later."
        return error_response(429, text, "overloaded", headers={"Retry-After": str(RETRY_AFTER)})
    except (Disconnected, ClientDisconnect):
        service.metrics.disconnects.inc()
        return Response(status_code=499)
    except Failed as error:
        return error_response(500 if service.ready else 503, f"{error}.", "engine_error")
    return StreamingResponse(_chain(first, events), media_type="text/event-stream")


def _prepare(service: Service, kind: type[GenerationRequest], body: bytes) -> Answers:
    """Read a request and encode its prompts."""
    parsed = parse_request(kind, body)
    _check_model(service, parsed.model)
    if isinstance(parsed, ChatRequest):
        return ChatAnswers.of(service, parsed)
    assert isinstance(parsed, CompletionRequest)
    return TextAnswers.of(service, parsed)


async def read_body(request: Request, most: int) -> bytes:
    """Read the body up to a limit; one that is not that of its Content-Digest is refused."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HttpError(413, f"The body exceeds {most} bytes.", "body_too_large")
        parts.append(part)
    body, stated = b"".join(parts), request.headers.get(DIGEST, "")
    if stated.startswith("sha-256=") and stated != http_digest(body):
        raise HttpError(400, "The body is not that of its Content-Digest.", DAMAGED)
    return body


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Json]) -> Json:
    """Run a coroutine to its end; cancel it if the client leaves."""
    own, left = asyncio.current_task(), False
    assert own is not None

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        own.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        own.uncancel()
        raise Disconnected from None
    finally:
        watching.cancel()


# Server-sent events.


async def _events(service: Service, answers: Answers) -> AsyncIterator[bytes]:
    """Chunks as events; an error after the first of them is an event too."""
    sent, ended = False, False
    try:
        chunks = answers.chunks()
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield _event(chunk)
                sent = True
        yield b"data: [DONE]\n\n"
        ended = True
    except Exception as error:
        ended = True
        if not sent:
            raise
        LOG.exception("a streamed answer failed")
        text = str(error) if isinstance(error, Failed) else "The server has failed"
        yield _event(responses.error(f"{text}.", "server_error", "engine_error"))
    finally:
        if not ended:
            service.metrics.disconnects.inc()


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(rest):  # type: ignore[type-var]
        yield first
        async for event in rest:
            yield event


def _event(data: Json) -> bytes:
    return f"data: {ENCODER.encode(data)}\n\n".encode()


# Errors.


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    kind = KINDS.get(status, INVALID if status < 500 else "server_error")
    response = JSONResponse(responses.error(message, kind, code, param), status, headers)
    response.headers[DIGEST] = http_digest(bytes(response.body))  # one that is damaged is noticed
    return response


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return error_response(400, str(error), error.code, error.param)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HttpError)
    return error_response(error.status, str(error), error.code, error.param)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of the framework, such as routes that do not exist."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    known = {404: (f"{path} does not exist.", "unknown_url")}
    known[405] = (f"{path}: the method is not allowed.", "method_not_allowed")
    message, code = known.get(error.status_code, (str(error.detail), "http_error"))
    return error_response(error.status_code, message, code, headers=dict(error.headers or {}))


# What every request passes.


class RequestMiddleware:
    """ASGI middleware: the key, request ids, metrics, one line of log, and a last resort.

    open_routes: those that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        key: str | None,
        open_routes: Sequence[str] = OPEN_ROUTES,
    ) -> None:
        self.app, self.service, self.key, self.open_routes = app, service, key, open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        given = headers.get("x-request-id", b"").decode("latin-1")
        number = given if REQUEST_ID.fullmatch(given) else responses.random_id()
        begun, status = time.monotonic(), 0  # 0: nothing was sent

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", number.encode("latin-1")),
                ]
            await send(message)

        try:
            if scope["path"] not in self.open_routes and not self._has_key(headers):
                denied = error_response(
                    401, "A key is required: Authorization: Bearer KEY.", "invalid_key"
                )
                await denied(scope, receive, answer)
            else:
                await self.app(scope, receive, answer)
        except Exception:  # a fault of ours: an error object, and the log has the traceback
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                failed = error_response(500, "The server has failed.", "internal_error")
                await failed(scope, receive, answer)
        finally:
            self._record(scope, status or 500, time.monotonic() - begun, number)

    def _has_key(self, headers: dict[str, bytes]) -> bool:
        if self.key is None:
            return True
        kind, _, token = headers.get("authorization", b"").partition(b" ")
        same = hmac.compare_digest(token.strip(), self.key.encode())
        return kind.lower() == b"bearer" and same

    def _record(self, scope: Scope, status: int, seconds: float, number: str) -> None:
        path = scope["path"]
        if path not in BODIES:  # whose routes FastAPI does not note
            path = getattr(scope.get("route"), "path", "unknown")
        self.service.metrics.requests.labels(path, str(status)).inc()
        self.service.metrics.seconds.observe(seconds)
        line = {"request": number, "method": scope["method"], "path": path, "status": status}
        LOG.info(json.dumps(line | {"seconds": round(seconds, 4)}))
