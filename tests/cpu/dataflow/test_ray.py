"""A Ray cluster of two nodes on this machine: the bits of the synchronous loop, and what becomes of
a run whose node, judge and learner rank are killed."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import Hears, metrics, row_config, trained

from sparrow import api
from sparrow.dataflow.asynchronous.messages import LoadWeights, Open, encode
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.models import load
from sparrow.schema.asynchronous import AuditConfig
from sparrow.schema.train import TrainConfig

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from sparrow.dataflow.ray_cluster import _cluster, _WorkerActor, train_on_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WORKERS = 4  # CPUs of the second node: two rollout workers with their judges


class Acts(Hears):
    """Does something once at the first call of each name, and after each step."""

    def __init__(self, at: Mapping[int | str, Callable[[], Any]]) -> None:
        super().__init__()
        self.at = dict(at)
        self.steps: list[int] = []

    def _act(self, when: int | str) -> None:
        if (act := self.at.pop(when, None)) is not None:
            act()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self._act(name)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(int(metrics["step"]))
        self._act(int(metrics["step"]))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with room for two ranks and the evaluation; workers need another node."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    yield started
    started.shutdown()


def kill(name: str) -> None:
    """kill -9 of one actor process of a class, as soon as there is one."""
    title, deadline = f"ray::{name}".encode(), time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "cmdline").read_bytes().startswith(title):
                    os.kill(int(folder.name), signal.SIGKILL)
                    return
        time.sleep(0.1)
    raise AssertionError(f"no process of {name}")


def of(
    place: tuple[Path, Path], folder: Path, cluster: Cluster | None, **changes: Any
) -> TrainConfig:
    address = {} if cluster is None else {"ray": cluster.address}
    run = {**address, **changes.pop("run", {})}
    return row_config(*place[:1], folder, *place[1:], changes.pop("loop"), run=run, **changes)


def test_staleness_0_is_the_synchronous_loop(
    cluster: Cluster, chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    """Weights of both runs, one of them by actors, which have a thread each."""
    place, threads = (chat_model, rows), torch.get_num_threads()
    torch.set_num_threads(1)
    trained(of(place, tmp_path / "sync", None, loop="sync"), judge=None)
    torch.set_num_threads(threads)
    node = cluster.add_node(num_cpus=WORKERS)
    dispatch = {"staleness": 0}
    config = of(place, tmp_path / "ray", cluster, loop="async", dispatch=dispatch)
    assert train_on_ray(config) == tmp_path / "ray" / "model"
    cluster.remove_node(node)
    here, there = (load(tmp_path / name / "model").state_dict() for name in ("sync", "ray"))
    assert all(torch.equal(weight, there[name]) for name, weight in here.items())
    assert not api.audit(AuditConfig(run=tmp_path / "ray")).problems


@pytest.mark.xfail(strict=False, reason="on a busy x86 machine ray starts the judge late")
def test_a_run_goes_on_when_nodes_come_and_go(
    cluster: Cluster, chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    """Two ranks; workers join with a node, leave with it, come back; a judge and a rank die."""
    nodes = list[Any]()

    def join() -> None:
        nodes.append(cluster.add_node(num_cpus=WORKERS))

    def leave_and_join() -> None:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        join()

    acts = Acts(
        {
            "rollout": join,  # the learner waits: no worker has room
            1: leave_and_join,
            3: lambda: kill("_JudgeActor"),
            4: lambda: kill("_LearnerRank"),
        }
    )
    config = of(
        (chat_model, rows),
        tmp_path / "run",
        cluster,
        loop="async",
        dispatch={"staleness": 2, "workers": 2, "attempts": 20},
        run={"ranks": 2, "steps": 7, "save_every": 1},
    )
    train_on_ray(config, callbacks=acts)
    cluster.remove_node(nodes.pop())
    assert not acts.at
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(7)]
    assert any("start again from the last checkpoint" in text for text in acts.told)
    audit = api.audit(AuditConfig(run=tmp_path / "run"))
    assert not audit.problems
    assert audit.used == 7 * config.rollout.prompts


def test_a_stop_saves_a_checkpoint_and_the_same_call_resumes(
    cluster: Cluster, chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    """A synchronous run by two ranks, whose driver is asked to stop."""
    stopping = GracefulShutdown()

    def stop() -> None:
        stopping.requested = True

    config = of(
        (chat_model, rows),
        tmp_path / "run",
        cluster,
        loop="sync",
        run={"ranks": 2, "steps": 4, "save_every": 4},
    )
    acts = Acts({0: stop})
    with pytest.raises(Stopped):
        train_on_ray(config, callbacks=acts, stopping=stopping)
    assert max(acts.steps) < 3
    train_on_ray(config)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(4)]


def test_a_cluster_that_is_not_there(chat_model: Path, rows: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "nosuch"):
        config = row_config(chat_model, tmp_path / "run", rows, "async", run={"ray": address})
        with pytest.raises(ValueError, match=r"run\.ray: no cluster at"):
            train_on_ray(config)


def test_a_setting_that_a_worker_refuses_ends_the_run(
    cluster: Cluster, chat_model: Path, rows: Path, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=WORKERS)
    data = {"rows": str(rows), "reward": "support.rewards:no_such_function", "workers": 1}
    config = of((chat_model, rows), tmp_path / "run", cluster, loop="async", data=data)
    with pytest.raises(EpisodeFailed, match="no_such_function"):
        train_on_ray(config)
    cluster.remove_node(node)


def test_messages_that_overtake_each_other_are_taken_in_order(tmp_path: Path) -> None:
    """As Ray may run calls of an actor; here without Ray."""
    opening = Open(role="rollout", config="{}", path=(), threads=None)

    async def taken() -> list[Any]:
        actor = _WorkerActor(encode(opening), None, str(tmp_path))
        loads = [LoadWeights(version=n, file="x", in_flight="keep") for n in range(3)]
        for number in (2, 0, 1):
            await actor.send(number, encode(loads[number]), {})
        return [actor._channel.arriving.get_nowait() for _ in loads]

    assert [message.version for message in asyncio.run(taken())] == [0, 1, 2]


def test_a_cluster_of_this_machine_is_not_another_one(
    chat_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: a second cluster in this process may disturb connections to the first."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    config = row_config(chat_model, tmp_path / "run", rows, "async", run={"ray": "local"})
    said: list[str] = []
    with _cluster(config, said.append):
        assert said[0].startswith("Ray cluster of 1 machines")
