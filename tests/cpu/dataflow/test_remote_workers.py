"""Workers of other machines: the server beside the learner, and `sparrow worker` in a process."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.products import rows_are_independent
from support.proxy import Line, bad_line
from support.training import SPARSE, Hears, metrics, model_folder, row_config
from support.training import settings as settings_of
from support.waiting import until

from sparrow import __version__
from sparrow.dataflow.asynchronous.exchange import FrameBody, FrameExchange, seal, unseal
from sparrow.dataflow.asynchronous.messages import AbortGroup, GroupFailed, Join, encode
from sparrow.dataflow.asynchronous.rollout import AsyncRolloutSide
from sparrow.dataflow.asynchronous.weight_versions import KEPT, VersionGone, WeightVersions
from sparrow.dataflow.asynchronous.workers import WeightsFile, WorkerLost
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.run import open_run
from sparrow.dataflow.run_files import lines_by_step, read_rollouts
from sparrow.models.deltas import Delta, digest
from sparrow.schema.asynchronous import WORKER_KEY, AsyncStatus, AuditConfig, WorkerConfig
from sparrow.schema.base import to_dict
from sparrow.schema.train import TrainConfig

EXACT = rows_are_independent()
httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from sparrow.dataflow.asynchronous import remote_workers  # noqa: E402
from sparrow.dataflow.asynchronous.remote_workers import (  # noqa: E402
    KEY_FILE,
    RemoteSession,
    RemoteWorkers,
)
from sparrow.dataflow.asynchronous.worker_client import (  # noqa: E402
    RunLine,
    WorkerRefused,
    answer_prompts,
)

KEY = "a key of the tests, long enough"


def weights(value: float) -> dict[str, torch.Tensor]:
    made = {"a": torch.arange(4000, dtype=torch.float32), "b": torch.ones(8, 8)}
    made["a"][::500] += value
    return made


def publish(versions: WeightVersions, version: int) -> None:
    file = WeightsFile(weights(float(version)), version)
    versions.publish(file)
    file.close()


class Server:
    """A server with a client that has the key, and the sessions that have joined."""

    def __init__(self, folder: Path) -> None:
        config = {"listen": "127.0.0.1:0"}
        plain = settings_of(folder, folder, run={"loop": "async"}, dispatch=config)
        self.config = TrainConfig.model_validate_json(json.dumps(plain))
        self.sessions: list[RemoteSession] = []
        self.versions = WeightVersions()
        self.workers = RemoteWorkers(self.config, folder, self.versions, self._join)
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx2.Client(base_url=f"{self.workers.address}/worker/", headers=headers)

    def _join(self, session: RemoteSession, name: str) -> str:
        self.sessions.append(session)
        return name

    def open(self) -> RemoteSession:
        """A session whose name the client sends from now on."""
        join = Join(name="far", sparrow=__version__)
        answer = self.client.post("open", content=seal(json.dumps(to_dict(join)).encode()))
        joined = json.loads(unseal(answer.content))
        assert TrainConfig.model_validate_json(joined["config"]) == self.config
        self.client.headers["x-sparrow-session"] = joined["session"]
        return self.sessions[-1]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv(WORKER_KEY, KEY)
    made = Server(tmp_path)
    yield made
    made.client.close()
    made.workers.close(ended=False)


def test_every_request_needs_the_key(server: Server) -> None:
    for key in ("", "Bearer", "Bearer wrong", KEY):
        for path, method in (
            *(("open", "POST"), ("exchange", "POST"), ("leave", "POST")),
            *(("weights", "GET"), ("file", "GET")),
        ):
            answer = server.client.request(method, path, headers={"authorization": key})
            assert answer.status_code == 401
    assert not server.sessions


def test_what_is_not_of_a_session_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = FrameBody(0, 1, ()).pack()
    assert server.client.post("exchange", content=empty).json()["code"] == "lost"
    session = server.open()
    assert server.client.post("exchange", content=empty).status_code == 200
    assert server.client.post("exchange", content=b"rubbish").status_code == 400
    assert server.client.post("open", content=seal(b'{"name": "x"}')).status_code == 400
    assert server.client.get("file", params={"key": "model.name"}).status_code == 404
    monkeypatch.setattr(remote_workers, "MOST_BODY", 1000)
    assert server.client.post("exchange", content=bytes(1001)).status_code == 413
    other = Join(name="far", sparrow="0.0")
    content = seal(json.dumps(to_dict(other)).encode())
    assert server.client.post("open", content=content).status_code == 409
    session.close()
    assert server.client.post("exchange", content=empty).json()["code"] == "lost"


def test_requests_that_come_again_or_late_change_nothing(server: Server) -> None:
    session, own = server.open(), FrameExchange()
    bodies = []
    for lease in range(3):
        own.push(encode(GroupFailed(lease=lease, reason="x")))
        bodies.append(own.body().pack())
    session.send(AbortGroup(lease=7))
    for number in (1, 0, 1, 2, 2, 0):
        answer = FrameBody.unpack(server.client.post("exchange", content=bodies[number]).content)
    assert answer.acknowledged == 3
    received = [session.receive() for _ in range(3)]
    assert received == [GroupFailed(lease=lease, reason="x") for lease in range(3)]
    assert not session._inbox
    for _ in range(2):  # the first answer is lost
        poll = server.client.post("exchange", params={"wait": 5}, content=own.body().pack())
        fresh = FrameBody.unpack(poll.content)
        assert fresh.frames == (encode(AbortGroup(lease=7)),)
    assert len(own.accept(fresh)) == 1
    assert not own.accept(fresh)
    server.client.post("exchange", content=own.body().pack())
    assert not session.exchange.waiting


def test_a_request_that_waits_is_answered_at_once_when_there_is_a_message(server: Server) -> None:
    session = server.open()
    threading.Timer(0.2, lambda: session.send(AbortGroup(lease=1))).start()
    begun = time.monotonic()
    poll = server.client.post("exchange", params={"wait": 15}, content=FrameBody(0, 1, ()).pack())
    assert len(FrameBody.unpack(poll.content).frames) == 1
    assert time.monotonic() - begun < 10


def test_a_worker_that_leaves_and_a_message_that_is_none(server: Server) -> None:
    session, own = server.open(), FrameExchange()
    for frame in (b"", b"rubbish of some length", encode(AbortGroup(lease=1))[:-1]):
        own.push(frame)
    server.client.post("exchange", content=own.body().pack())
    for _ in range(3):
        with pytest.raises(ValueError, match="message of"):
            session.receive()
    server.client.post("leave")
    with pytest.raises(WorkerLost, match="left"):
        session.receive()


def test_workers_hear_that_the_run_has_ended(server: Server) -> None:
    server.open()
    answers: list[Any] = []

    def poll() -> None:
        answers.append(
            server.client.post("exchange", params={"wait": 15}, content=FrameBody(0, 1, ()).pack())
        )

    waiting = threading.Thread(target=poll)
    waiting.start()
    time.sleep(0.3)
    server.workers.close(ended=True)
    waiting.join(10)
    assert [answer.json()["code"] for answer in answers] == ["ended"]


def test_weights_are_deltas_where_the_worker_has_a_version_that_is_kept(server: Server) -> None:
    server.open()
    for version in range(KEPT + 1):
        publish(server.versions, version)

    def ask(version: int, have: int, known: str, dtype: str = "float32", **more: Any) -> Any:
        query = {"version": version, "have": have, "digest": known, "dtype": dtype, **more}
        return server.client.get("weights", params=query)

    known = f"{digest(weights(3.0)):016x}"
    answer = ask(KEPT, 3, known)
    delta = Delta.decode(unseal(answer.content))
    own = weights(3.0)
    delta.apply(own)
    assert not delta.is_whole
    assert len(answer.content) < 1000
    assert torch.equal(own["a"], weights(float(KEPT))["a"])
    assert ask(KEPT, 3, known, offset=50).content == answer.content[50:]
    assert ask(3, 3, known).status_code == 204
    for have, wrong in ((3, f"{1:016x}"), (3, ""), (0, f"{digest(weights(0.0)):016x}"), (9, known)):
        assert Delta.decode(unseal(ask(KEPT, have, wrong).content)).is_whole
    whole = Delta.decode(unseal(ask(KEPT, 3, known, dtype="bfloat16").content))
    assert {change.dtype for change in whole.changes.values()} == {"bfloat16"}
    assert ask(0, 3, known).json()["code"] == "gone"
    assert ask(KEPT, 3, known, dtype="int8").status_code == 400
    with pytest.raises(VersionGone):
        server.versions.encoded(KEPT + 1, have=3, known=known, dtype="float32")


def test_the_key_is_in_the_folder_unless_the_environment_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    key = remote_workers.worker_key(tmp_path)
    assert len(key) > 30
    assert remote_workers.worker_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    monkeypatch.setenv(WORKER_KEY, KEY)
    assert remote_workers.worker_key(tmp_path) == KEY
    monkeypatch.delenv(WORKER_KEY)
    (tmp_path / KEY_FILE).write_text("short")
    with pytest.raises(ValueError, match="16 characters"):
        remote_workers.worker_key(tmp_path)


def test_a_worker_that_cannot_open_its_model_ends_with_the_reason(server: Server) -> None:
    def lose() -> None:  # as the coordinator does
        assert until(lambda: any(session.inbox for session in server.sessions), 120)
        server.sessions[0].close()

    threading.Thread(target=lose, daemon=True).start()
    config = WorkerConfig(connect=server.workers.address, model="/nonexistent")
    with pytest.raises(ValueError, match="/nonexistent"):
        asyncio.run(answer_prompts(config, lambda text: None))
    assert len(server.sessions) == 1


def test_a_request_that_cannot_be_sent_is_not_repeated_for_ever(server: Server) -> None:
    async def ask(line: RunLine) -> None:
        line.session = "a name\nthat no header can have"
        with pytest.raises(WorkerRefused, match="cannot be sent"):
            await line.post("leave", b"", unseal)
        with pytest.raises(WorkerRefused, match="cannot be sent"):
            await line.fetch("file", key="data.rows")

    async def work() -> None:
        async with httpx2.AsyncClient(base_url=server.client.base_url) as http:
            await ask(RunLine(http, lambda text: None))

    asyncio.run(work())


@pytest.mark.parametrize("given", ["{}", "[]"])
def test_a_configuration_that_is_none_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    false = SimpleNamespace(model_dump_json=lambda: given)
    monkeypatch.setattr(server.workers, "_config", false)
    with pytest.raises(ValueError, match=r"object|required"):
        asyncio.run(answer_prompts(WorkerConfig(connect=server.workers.address), lambda text: None))


# Runs, with `sparrow worker` in a process.


def chosen(model: Path, folder: Path, rows: Path, loop: str, **changes: Any) -> TrainConfig:
    """A run that other machines may join, if it is asynchronous."""
    listen = {"listen": "127.0.0.1:0"} if loop == "async" else {}
    dispatch = {**listen, **changes.pop("dispatch", {})}
    return row_config(model, folder, rows, loop, dispatch=dispatch, **changes)


@pytest.fixture
def worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts `sparrow worker`; what it says is in far.txt."""
    monkeypatch.setenv(WORKER_KEY, KEY)
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str, *options: str, **environment: str) -> "subprocess.Popen[bytes]":
        words = ["-m", "sparrow", "worker", "--connect", address, "--name", "far", *options]
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        with (tmp_path / "far.txt").open("ab") as said:
            output = {"stdout": said, "stderr": said}
            process = subprocess.Popen([sys.executable, *words], env=own, cwd=tmp_path, **output)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Meets(Hears):
    """A watcher that lets a step begin when so many workers are there."""

    def __init__(self, workers: int, begin: Callable[[AsyncRolloutSide], Any]) -> None:
        super().__init__()
        self.workers, self.begin = workers, begin
        self.side: Any = None
        self.begun: Any = None

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        if name != "rollout" or self.side is None:
            return
        self.begun = self.begun or self.begin(self.side)
        assert until(self._all_there, 300), self.told

    def _all_there(self) -> bool:
        ready = [w for w in self.side.coordinator.rollout_workers if w.version is not None]
        return len(ready) >= self.workers


def run_with(settings: TrainConfig, meets: Meets) -> None:
    with open_run(settings, callbacks=meets) as run:
        meets.side = run.rollout
        train(run)


def audited(folder: Path) -> Any:
    from sparrow import api

    found = api.audit(AuditConfig(run=folder))
    assert not found.problems
    return found


def sampled_by(folder: Path, steps: int) -> set[str]:
    groups = [group for step in range(steps) for group in read_rollouts(folder, step)]
    return {t.worker for group in groups for t in group.trajectories}


def assert_same_rollouts(here: Path, there: Path, steps: int) -> None:
    """Bit for bit; where the rounding of products depends on their rows, the first step's."""
    for step in range(steps if EXACT else 1):
        for one, two in zip(read_rollouts(here, step), read_rollouts(there, step), strict=True):
            plain = [t.replace(worker="", dtype="") for t in two.trajectories]
            if EXACT:
                assert one == two.replace(trajectories=tuple(plain))
            for mine, theirs in zip(one.trajectories, plain, strict=True):
                assert mine.ids.tolist() == theirs.ids.tolist()
                assert mine.rollout_logprob == pytest.approx(theirs.rollout_logprob, abs=1e-4)


@pytest.mark.slow
def test_a_local_and_a_remote_worker_give_the_bits_of_the_synchronous_loop(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    here, there = tmp_path / "sync", tmp_path / "async"
    few = {"prompts": 6, "max_running": 4, "attention": SPARSE}  # a group at once: both get some
    with open_run(chosen(chat_model, here, rows, "sync", rollout=few)) as run:
        train(run)
    dispatch = {"staleness": 0, "listen": "127.0.0.1:0"}
    settings = chosen(chat_model, there, rows, "async", rollout=few, dispatch=dispatch)
    meets = Meets(2, lambda side: worker(side.remote.address, "--allow-code"))
    run_with(settings, meets)
    assert_same_rollouts(here, there, 4)
    assert sampled_by(there, 4) == {"", "far"}
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean") if EXACT else ():
        assert [m[name] for m in metrics(here)] == [m[name] for m in metrics(there)]
    assert metrics(there)[-1]["async/workers"] == 2
    audited(there)
    assert meets.begun.wait(30) == 0, (tmp_path / "far.txt").read_text()
    status = AsyncStatus.load(there)
    assert status is not None
    assert status.address == meets.side.remote.address


@pytest.mark.slow
def test_a_killed_worker_is_forgotten_and_another_one_joins(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    dispatch = {"listen": "127.0.0.1:0", "workers": 0, "worker_timeout": 5.0}
    folder = tmp_path / "run"
    settings = chosen(chat_model, folder, rows, "async", dispatch=dispatch, run={"steps": 6})
    processes: list[Any] = []

    def kill(side: AsyncRolloutSide) -> Any:
        def play() -> None:
            assert side.remote is not None
            processes.append(worker(side.remote.address, "--allow-code"))
            assert until(lambda: any(w.begun for w in side.coordinator.rollout_workers), 300)
            processes[0].send_signal(signal.SIGKILL)
            processes.append(worker(side.remote.address, "--allow-code"))

        threading.Thread(target=play, daemon=True).start()
        return True

    meets = Meets(0, kill)
    run_with(settings, meets)
    assert any("was lost: no request for 5 s" in text for text in meets.told)
    assert len(metrics(folder)) == 6
    found = audited(folder)
    assert found.again["worker lost"] > 0
    assert processes[1].wait(30) == 0


PROGRAM = """
import sys
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.run import open_run
from sparrow.schema.train import TrainConfig
with open_run(TrainConfig.model_validate_json(open(sys.argv[1]).read())) as run:
    train(run)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_and_its_worker_joins_again(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dispatch = {"listen": f"127.0.0.1:{port}", "workers": 0}
    folder, file = tmp_path / "run", tmp_path / "config.json"
    settings = chosen(chat_model, folder, rows, "async", dispatch=dispatch, run={"steps": 6})
    file.write_text(settings.model_dump_json(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM, str(file)]
    process = subprocess.Popen(words, env=environment)
    far = worker(f"http://127.0.0.1:{port}", "--allow-code")
    written = folder / "metrics.jsonl"
    assert until(lambda: process.poll() is not None or len(lines_by_step(written)) > 2, 300)
    process.kill()
    process.wait()
    resumed = subprocess.Popen(words, env=environment)
    assert resumed.wait(300) == 0
    assert far.wait(30) == 0
    assert [step["step"] for step in metrics(folder)] == [*range(6)]
    assert sampled_by(folder, 6) == {"far"}
    audited(folder)
    said = (tmp_path / "far.txt").read_text()
    assert "joining again" in said
    assert "the run has ended" in said


@pytest.mark.slow
def test_a_worker_that_samples_in_another_way_is_recorded_and_not_read_by_the_gate(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    few = {"prompts": 6, "max_running": 4, "attention": SPARSE}  # a group at once: both get some
    dispatch = {"staleness": 2, "listen": "127.0.0.1:0"}
    settings = chosen(chat_model, tmp_path / "run", rows, "async", rollout=few, dispatch=dispatch)
    options = ("--allow-code", "--dtype", "bfloat16", "--decoding", "dense")
    run_with(settings, Meets(2, lambda side: worker(side.remote.address, *options)))
    seen = set()
    for step in range(4):
        for group in read_rollouts(tmp_path / "run", step):
            seen |= {(t.worker, t.dtype, t.attention) for t in group.trajectories}
    assert {one for one in seen if one[0]} == {("far", "bfloat16", "dense")}
    assert {attention for name, _, attention in seen if not name} != {"dense"}
    measured = [step for step in metrics(tmp_path / "run") if "async/accept/far" in step]
    assert measured
    assert all(0 < step["async/accept/far"] <= 1 for step in measured)
    audited(tmp_path / "run")


@pytest.mark.slow
def test_a_line_that_delays_cuts_damages_and_repeats_changes_nothing(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    """At staleness 0, and although the worker's model has other weights: it fetches those."""
    here, there = tmp_path / "local", tmp_path / "far"
    unlike = model_folder(tmp_path / "unlike", chat=True, size=5.0)
    with open_run(chosen(chat_model, here, rows, "sync", run={"steps": 4})) as run:
        train(run)
    dispatch = {"listen": "127.0.0.1:0", "workers": 0, "staleness": 0}
    settings = chosen(chat_model, there, rows, "async", dispatch=dispatch, run={"steps": 4})
    line = Line(delay=0.02, cut=0.05, corrupt=0.05, repeat=0.05)
    with ExitStack() as opened:

        def join(side: AsyncRolloutSide) -> Any:
            assert side.remote is not None
            address = opened.enter_context(bad_line(side.remote.address, line))
            return worker(address, "--allow-code", "--model", str(unlike))

        run_with(settings, Meets(0, join))
    assert line.faults.total() >= 3
    assert_same_rollouts(here, there, 4)
    audited(there)


@pytest.mark.slow
def test_a_worker_refuses_code_and_a_run_refuses_a_wrong_key(
    chat_model: Path, rows: Path, tmp_path: Path, worker: Any
) -> None:
    ends: dict[str, int] = {}

    def play(side: AsyncRolloutSide) -> Any:
        assert side.remote is not None
        ends["code"] = worker(side.remote.address).wait(120)
        wrong = {WORKER_KEY: "another key of the tests"}
        ends["key"] = worker(side.remote.address, "--allow-code", **wrong).wait(120)
        return True

    run_with(chosen(chat_model, tmp_path / "run", rows, "async"), Meets(1, play))
    assert ends == {"code": 2, "key": 2}
    said = " ".join((tmp_path / "far.txt").read_text().split())
    assert "--allow-code" in said
    assert WORKER_KEY in said
    audited(tmp_path / "run")
