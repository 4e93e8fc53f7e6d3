"""Servers as processes of this environment, and programs of clients in others.

`make test-clients` builds those and sets SPARROW_CLIENTS to the folder that holds them.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

PROGRAMS = Path(__file__).parents[1] / "clients" / "programs"
KEY = "a-key-of-the-tests"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


class Server(NamedTuple):
    """A server that runs, the name of its model and the folder of that."""

    url: str
    model: str
    folder: Path | None = None


@contextmanager
def started(model: str | Path, *options: str) -> Iterator[str]:
    """`sparrow serve MODEL` in a process of its own, with a key, until the context ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sparrow", "serve", str(model), "--port", str(port)]
    command += ["--device", "cpu", "--kv-gib", "0.5", *options]
    process = subprocess.Popen(command, env=os.environ | {"SPARROW_API_KEY": KEY})
    root = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(root, process)
        yield f"{root}/v1"
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(root: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server has failed"
        try:
            if httpx2.get(f"{root}/ready").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server was not ready within two minutes")


def run_program(interpreter: str, *words: str | Path, needs: str, folder: Path) -> Any:
    """Run a program in another environment; return the JSON of its last line.

    needs: the module without which the test is skipped.
    """
    probe = f"import importlib.util as u, sys; sys.exit(not u.find_spec({needs!r}))"
    if subprocess.run([interpreter, "-c", probe]).returncode:
        pytest.skip(f"no package {needs} in {interpreter}")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, *map(str, words)],
        env=environment | OFFLINE,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1]) if words[0] != "-m" else None
