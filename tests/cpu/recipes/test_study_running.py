"""Jobs in processes: how many at once, in which order, and how they fail and end."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from support.pretending import pretend

from sparrow_recipes.study import running
from sparrow_recipes.study.running import Job, JobFailed, Jobs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend(tmp_path, monkeypatch)
    return tmp_path


def job(name: str, *words: str, ready: Callable[[], bool] = lambda: True) -> Job:
    """Done when a file of its name is there."""
    words = words or ("write", name)
    done = Path(name).resolve().exists
    return Job(name=name, words=words, log=Path("logs") / name, done=done, ready=ready)


class Watched:
    """Jobs whose events and looks are kept."""

    def __init__(self, parallel: int, stop: Callable[[], bool] = lambda: False) -> None:
        self.events: list[str] = []
        self.looks: list[list[str]] = []
        self.jobs = Jobs(parallel, stop=stop, event=self.events.append, look=self._look)

    def _look(self, names: Sequence[str]) -> None:
        self.looks.append(list(names))

    def run(self, *jobs: Job) -> bool:
        return self.jobs.run(jobs)


def test_a_job_is_a_command_of_this_package(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "version.txt"
    job = Job(
        name="version",
        words=("--version",),
        log=log,
        done=lambda: log.exists() and bool(log.read_text().strip()),
        ready=lambda: True,
    )
    watched = Watched(1)
    assert watched.run(job)
    assert watched.events == ["version: begins", "version: done"]
    assert log.read_text().strip()[0].isdigit()


def test_one_at_a_time_in_their_order(place: Path) -> None:
    watched = Watched(1)
    assert watched.run(*map(job, "abc"))
    order = [f"{name}: {what}" for name in "abc" for what in ("begins", "done")]
    assert watched.events == order
    assert max(map(len, watched.looks)) == 1
    assert all((place / name).exists() for name in "abc")


def test_no_more_than_allowed_at_once_and_that_many(place: Path) -> None:
    """a and b end only when both run."""
    watched = Watched(2)
    assert watched.run(job("a", "meet", "a", "b"), job("b", "meet", "b", "a"), *map(job, "cde"))
    assert max(map(len, watched.looks)) == 2
    assert watched.events[:2] == ["a: begins", "b: begins"]
    assert len(watched.events) == 10


def test_what_is_done_is_not_run_again(place: Path) -> None:
    (place / "a").touch()
    watched = Watched(2)
    assert watched.run(job("a", "fail"), job("b"))
    assert watched.events == ["b: begins", "b: done"]
    assert Watched(1).run(job("a", "fail"))
    assert Watched(1).run()


def test_a_job_that_is_not_ready_lets_others_pass(place: Path) -> None:
    watched = Watched(1)
    assert watched.run(job("late", ready=(place / "early").exists), job("early"))
    assert watched.events == ["early: begins", "early: done", "late: begins", "late: done"]


def test_a_job_that_fails_is_told_with_the_end_of_its_log(place: Path) -> None:
    """1000 letters come before the reason; 400 characters are told. Others are asked to end."""
    watched = Watched(2)
    with pytest.raises(JobFailed) as error:
        watched.run(
            job("long", "wait", "begun"), job("bad", "fail", ready=(place / "begun").exists)
        )
    text = str(error.value)
    assert text.startswith(f"bad ended with code 3; {Path('logs') / 'bad'} ends:\nx")
    assert text.endswith("x this went wrong")
    assert len(text) < 500
    assert (place / "begun.asked").exists()
    assert "bad: done" not in watched.events


def test_a_job_that_ends_well_without_its_work_has_failed(place: Path) -> None:
    with pytest.raises(JobFailed, match="a ended with code 0"):
        Watched(1).run(job("a", "write", "something else"))


def test_a_second_try_adds_to_the_log(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(JobFailed):
            Watched(1).run(job("a", "fail"))
    assert (place / "logs" / "a").read_text().count("went wrong") == 2


def test_the_wish_to_stop_asks_all_to_end_and_starts_no_more(place: Path) -> None:
    begun = [place / "a.begun", place / "b.begun"]
    watched = Watched(2, stop=lambda: all(file.exists() for file in begun))
    assert not watched.run(job("a", "wait", "a.begun"), job("b", "wait", "b.begun"), job("c"))
    assert watched.events == ["a: begins", "b: begins"]
    assert (place / "a.begun.asked").exists()
    assert (place / "b.begun.asked").exists()
    assert not (place / "c").exists()


def test_nothing_begins_where_the_end_is_wanted_from_the_start(place: Path) -> None:
    watched = Watched(1, stop=lambda: True)
    assert not watched.run(job("a"))
    assert watched.events == []


def test_who_does_not_listen_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE", 0.2)
    opened: list[subprocess.Popen[bytes]] = []
    inner = Jobs._open

    def remember(self: Jobs, job: Job) -> "subprocess.Popen[bytes]":
        opened.append(inner(self, job))
        return opened[-1]

    monkeypatch.setattr(Jobs, "_open", remember)
    assert not Watched(1, stop=(place / "begun").exists).run(job("a", "deaf", "begun"))
    assert [process.returncode for process in opened] == [-9]
