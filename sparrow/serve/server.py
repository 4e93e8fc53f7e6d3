"""`sparrow serve`: load a model and listen."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparrow.engine.answer import DENSE, ResolvedDecoding, resolve_decoding
from sparrow.engine.engine import Engine, describe_model
from sparrow.engine.language import Language
from sparrow.engine.pool import PAGE
from sparrow.models import load
from sparrow.models.actor import load_actor
from sparrow.schema.common import DecodingConfig
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.serve import ServeConfig
from sparrow.serve import responses
from sparrow.serve.admin import make_admin_app
from sparrow.serve.app import INVALID, make_app
from sparrow.serve.service import Service
from sparrow.sparse.rule import Rule

GIB = 2**30
MAX_HEAD = 2**19  # bytes; more than one read of a socket, which may hold a body too


class _HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with an error object where a request is no HTTP or its head too long."""

    _head = 0  # bytes of a head that has not ended

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head = 0 if self._head_ended else self._head + len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    @property
    def _head_ended(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(responses.error(msg, INVALID)).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode())
        self.transport.write(b"connection: close\r\n\r\n" + body)
        self.transport.close()


def open_service(config: ServeConfig, report: Callable[[str], None]) -> Service:
    """Load the model and build its engine."""
    model = load(config.model, device=config.device, dtype=config.dtype, report=report)
    attention = {name: getattr(config, name) for name in ("schedule", "budget", "flow", "force")}
    settings = {"attention": attention, "decoding": config.decoding}
    if config.draft_tokens is not None:
        settings["speculative"] = {"draft_tokens": config.draft_tokens}
    decoding = resolve_decoding(DecodingConfig.model_validate(settings), model.spec.family)
    kv_bytes = None if config.kv_gib is None else int(config.kv_gib * GIB)
    engine = Engine(
        model,
        rule=decoding.rule or Rule(),
        speculative=decoding.speculative,
        max_running=config.max_running,
        max_context=config.max_context,
        kv_bytes=kv_bytes,
    )
    if config.adapter is not None:
        engine.set_actor(load_actor(config.adapter, model).adapter)
    _warm_up(engine, decoding)
    report(f"{describe_model(model)} | {engine.header()} | decoding: {decoding.describe()}")
    name = config.name or config.model
    language = replace(Language.load(model), model=name)  # clients see no path
    return Service(config=config, engine=engine, language=language, decoding=decoding, name=name)


def _warm_up(engine: Engine, decoding: ResolvedDecoding) -> None:
    """Compile what the first request would wait for: a prompt and a few tokens, dense and not."""
    prompt = [0] * min(PAGE + 1, engine.max_context - 4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for settings in (DENSE.request, decoding.request) if prompt else ():
        engine.generate([prompt], params, **settings)


def serve(config: ServeConfig, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests then have `drain` seconds."""
    with ExitStack() as opened:
        listener = opened.enter_context(_listener(config.host, config.port))
        admin = None
        if config.admin_port is not None:
            admin = opened.enter_context(_listener(config.host, config.admin_port))
        service = open_service(config, report)
        service.admin_port = None if admin is None else admin.getsockname()[1]
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        key = "with a key" if config.key is not None else "without a key"
        report(f"{_address(listener)}/v1 {key}; Ctrl-C or SIGTERM ends it")
        if admin is not None:
            report(f"{_address(admin)}/admin with the admin key")
        run_server(service, listener, admin)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    service: Service, listener: socket.socket, admin: socket.socket | None = None
) -> None:
    """Serve on one port, or on two; a signal ends both, the admin port first."""
    server = http_server(service)
    if admin is None:
        server.run([listener])
        return
    second = http_server(service, make_admin_app(service))

    async def both() -> None:
        await asyncio.gather(server.serve([listener]), second.serve([admin]))

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(both())


def http_server(service: Service, app: ASGIApp | None = None) -> uvicorn.Server:
    """The server of a service, or of its admin app; `run` it with its sockets."""
    config = uvicorn.Config(
        app or make_app(service),
        http=_HttpProtocol,
        ws="none",
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(service.config.drain),
    )
    return uvicorn.Server(config)
