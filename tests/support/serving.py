"""A server of a model in a thread of this process, on a free port."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparrow.schema.serve import ServeConfig
from sparrow.serve.admin import make_admin_app
from sparrow.serve.server import http_server, open_service
from sparrow.serve.service import Service


class Running:
    """A server that runs: its address, and the service behind it."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port, self.root = service, port, f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"

    def wait_until_free(self, seconds: float = 20.0) -> None:
        """Wait until no sample is in flight, then check that nothing leaked."""
        engine, end = self.service.engine, time.monotonic() + seconds
        while self.service.sampler.in_flight or not engine.idle:
            assert time.monotonic() < end, "samples are still in flight"
            time.sleep(0.01)
        engine.check_integrity()
        assert not engine.loop.requests


@contextmanager
def serving(model: str, **settings: Any) -> Iterator[Running]:
    """Serve a model while the context is open; with an `admin_key` also on an admin port.

    port, admin: to listen on; 0: any.
    """
    ports, admin = [settings.pop(name, 0) for name in ("port", "admin")], "admin_key" in settings
    given = {"model": model, "device": "cpu", "kv_gib": 0.2, **settings}
    given |= {"admin_port": 1} if admin else {}
    service = open_service(ServeConfig.model_validate(given), report=lambda text: None)
    listeners = [socket.create_server(("127.0.0.1", number)) for number in ports[: 1 + admin]]
    servers = [http_server(service)]
    if admin:
        servers.append(http_server(service, make_admin_app(service)))
        service.admin_port = listeners[1].getsockname()[1]

    async def serve() -> None:
        pairs = zip(servers, listeners, strict=True)
        await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    while not all(server.started for server in servers):
        assert thread.is_alive(), "the server has failed"
        time.sleep(0.01)
    try:
        yield Running(service, listeners[0].getsockname()[1])
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
