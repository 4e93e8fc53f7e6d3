"""A server of a model in a thread of this process, on a free port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sparrow.schema.serve import ServeConfig
from sparrow.serve.app import make_app
from sparrow.serve.server import open_service
from sparrow.serve.service import Service


class Running:
    """A server that runs: its address, and the service behind it."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.root = service, f"http://127.0.0.1:{port}"
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        make_app(service), host="127.0.0.1", port=port, log_level="error", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
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
