"""Jobs in processes: how many at once, in which order, and how they fail and end."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.leftovers import marking
from support.pretending import pretend

from sparrow_recipes.study import running
from sparrow_recipes.study.running import Job, JobFailed, run_jobs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend(tmp_path, monkeypatch)
    return tmp_path


def job(name: str, *words: str, ready: Callable[[], bool] = lambda: True) -> Job:
    """Done when a file of its name is there."""
    done = Path(name).resolve().exists
    return Job(name, words or ("write", name), Path("logs") / name, done, ready)


class Watched:
    """Runs jobs; events are kept, and how many ran at once."""

    def __init__(self, parallel: int, stop: Callable[[], bool] = lambda: False) -> None:
        self.parallel, self.stop = parallel, stop
        self.events: list[str] = []
        self.most = 0

    def look(self, names: Sequence[str]) -> None:
        self.most = max(self.most, len(names))

    def run(self, *jobs: Job) -> bool:
        told = self.events.append
        return run_jobs(jobs, self.parallel, stop=self.stop, event=told, show=self.look)


def test_one_at_a_time_in_their_order_and_what_is_done_not_again(place: Path) -> None:
    watched = Watched(1)
    assert watched.run(*map(job, "abc"))
    order = [f"{name}: {what}" for name in "abc" for what in ("begins", "done")]
    assert (watched.events, watched.most) == (order, 1)
    assert all((place / name).exists() for name in "abc")
    assert watched.run(*map(job, "abc"))
    assert watched.events == order


def test_no_more_than_allowed_at_once_and_that_many(place: Path) -> None:
    """a and b end only when both run. A job that is not ready lets others pass."""
    watched = Watched(2)
    assert watched.run(job("a", "meet", "a", "b"), job("b", "meet", "b", "a"), *map(job, "cde"))
    assert watched.most == 2
    assert watched.events[:2] == ["a: begins", "b: begins"]
    watched = Watched(1)
    assert watched.run(job("late", ready=(place / "early").exists), job("early"))
    assert watched.events == ["early: begins", "early: done", "late: begins", "late: done"]


def test_a_job_that_fails_is_told_with_the_end_of_its_log(place: Path) -> None:
    """1000 letters come before the reason; 400 characters are told. Others are asked to end."""
    watched = Watched(2)
    jobs = job("long", "wait", "begun"), job("bad", "fail", ready=(place / "begun").exists)
    with pytest.raises(JobFailed) as error:
        watched.run(*jobs)
    text = str(error.value)
    assert text.startswith("bad ended with code 3")
    assert text.endswith("x this went wrong")
    assert len(text) < 500
    assert (place / "begun.asked").exists()
    assert "bad: done" not in watched.events
    with pytest.raises(JobFailed):  # a second try adds to the log
        watched.run(jobs[1])
    assert (place / "logs" / "bad").read_text().count("went wrong") == 2
    with pytest.raises(JobFailed, match="code 0"):  # it ends well, without its work
        watched.run(job("a", "write", "something else"))


def test_the_wish_to_stop_asks_all_to_end_and_starts_no_more(place: Path) -> None:
    begun = [place / "a.begun", place / "b.begun"]
    watched = Watched(2, stop=lambda: all(file.exists() for file in begun))
    assert not watched.run(job("a", "wait", "a.begun"), job("b", "wait", "b.begun"), job("c"))
    assert watched.events == ["a: begins", "b: begins"]
    assert all((place / f"{name}.begun.asked").exists() for name in "ab")
    assert not (place / "c").exists()
    assert not watched.run(job("d"))  # where the end is wanted from the start, nothing begins
    assert len(watched.events) == 2


def test_who_does_not_listen_is_killed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE", 0.2)
    with marking():  # at the end of which none is left
        assert not Watched(1, stop=(place / "begun").exists).run(job("a", "deaf", "begun"))
