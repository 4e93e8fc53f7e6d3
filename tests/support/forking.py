"""The command line in processes of its own, without the seconds that imports take.

A server imports what `sparrow train` needs, computes nothing, and forks for every command, so that
each can be killed, interrupted or limited like any other process. `python -m support.forking`
is the server: a JSON line in, a JSON line out.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

TESTS = Path(__file__).parents[1]


class Ended(NamedTuple):
    """returncode: as of subprocess, minus the number of a signal that ended it."""

    returncode: int
    stdout: str
    stderr: str


class Commands:
    """A server, and commands in its children."""

    def __enter__(self) -> Self:
        path = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "160"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"TERM": "dumb"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)

    def run(
        self, folder: Path, *words: str | Path, toy: str = "", most_bytes: int | None = None
    ) -> Ended:
        """`sparrow WORDS`; folder: for what it prints. most_bytes: that a file of it may have."""
        order = {"words": [*map(str, words)], "folder": str(folder), "toy": toy, "most": most_bytes}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return Ended(code, *((folder / name).read_text() for name in ("stdout", "stderr")))


def serve() -> None:
    import numba  # noqa: F401
    import torch._dynamo  # noqa: F401 (making a model on the meta device imports it)
    import transformers  # noqa: F401

    import sparrow.cli
    import sparrow.cli.training_display
    import sparrow.dataflow.local.loop
    import sparrow.dataflow.local.run  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(order: dict[str, Any]) -> None:
    """Be the process of a command, to its end."""
    from sparrow.cli import main

    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(
            os.open(Path(order["folder"]) / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number
        )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs may ignore it
    os.environ["SPARROW_TOY"] = order["toy"] or "none 0 0 0"
    if order["most"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["most"], order["most"]))
    sys.argv = ["sparrow", *order["words"]]
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve()
