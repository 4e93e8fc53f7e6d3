"""A server of a model in a thread of this process, on a free port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparrow.schema.serve import ServeConfig
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
    """Serve a model while the context is open."""
    given = {"model": model, "device": "cpu", "kv_gib": 0.2, **settings}
    service = open_service(ServeConfig.model_validate(given), report=lambda text: None)
    listener = socket.create_server(("127.0.0.1", 0))
    server, port = http_server(service), listener.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has failed"
        time.sleep(0.01)
    try:
        yield Running(service, port)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
