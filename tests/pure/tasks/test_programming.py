"""Programming tasks: right solutions pass, wrong ones fail, and prompts tell what is tested."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparrow.tasks.base import Row, check_json
from sparrow.tasks.programming.operations import OPERATIONS, parse_steps
from sparrow.tasks.programming.programs import compiled
from sparrow.tasks.programming.reference import REFERENCE
from sparrow.tasks.programming.statements import statement
from sparrow.tasks.programming.tasks import LEVELS, ProgrammingTasks, level_of

ROOT = Path(__file__).parents[3]
TASK = ProgrammingTasks()
SEEDS = {1: 200, 2: 200, 3: 200, 4: 150, 5: 80, 6: 50}  # rows; a hard one takes 30 ms
DIGEST = """
import hashlib, json
from sparrow.tasks.programming.tasks import LEVELS, ProgrammingTasks
task, drawn = ProgrammingTasks(), hashlib.sha256()
for level in LEVELS:
    for seed in range(3):
        row = task.row(seed, level.shortest)
        programs = [task.solution(row), *task.wrong_solutions(row)]
        drawn.update(json.dumps([row.prompt, row.data, programs]).encode())
print(drawn.hexdigest()[:16])
"""
each_level = pytest.mark.parametrize("number", SEEDS)


@cache
def row_of(number: int, seed: int) -> Row:
    return TASK.row(seed, LEVELS[number - 1].shortest)


def rows(number: int, count: int = 40) -> list[Row]:
    return [row_of(number, seed) for seed in range(count)]


def run(source: str, data: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a program as a judge does: a function is called, others read and print."""
    names: dict[str, Any] = {}
    if "fn_name" in data:
        exec(compiled(source), names)
        return names[data["fn_name"]](*json.loads(json.dumps(given)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(compiled(source), names)
    return written.getvalue()


def failures(source: str, data: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the hidden tests that a program fails; as a judge does, stop at an exception."""
    failed = 0
    for given, expected in zip(data["inputs"], data["outputs"], strict=True):
        try:
            failed += run(source, data, given, monkeypatch) != expected
        except Exception:
            return failed + 1
    return failed


@each_level
def test_solutions_pass_and_wrong_solutions_fail(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, row in enumerate(rows(number, SEEDS[number])):
        assert failures(TASK.solution(row), row.data, monkeypatch) == 0, row.id
        wrong = TASK.wrong_solutions(row)
        assert len({*wrong}) == len(wrong) >= 3
        if seed % 4 == 0:
            assert all(failures(source, row.data, monkeypatch) for source in wrong), row.id


@each_level
def test_examples_are_true_and_hidden_tests_are_others(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in rows(number):
        data, composition = row.data, parse_steps(row.data["steps"])
        assert 8 <= len(data["inputs"]) == len(data["outputs"]) <= 20
        assert len({str(given) for given in data["inputs"]}) >= 8
        assert len(data["examples"]) == 2
        for given, value in data["examples"]:
            assert composition.result(given) == value
            assert given not in data["inputs"]
            if "fn_name" in data:
                assert run(TASK.solution(row), data, given, monkeypatch) == value
                assert f"{tuple(given)!r}".rstrip(",)") in row.prompt
                assert f"returns `{value!r}`." in row.prompt
        most = Counter(map(str, data["outputs"])).most_common(1)[0][1]
        assert most <= 0.6 * len(data["outputs"]), "a constant is right too often"


@each_level
def test_examples_of_programs_are_shown_as_they_are_read(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in rows(number):
        if "fn_name" in row.data:
            continue
        blocks = row.prompt.split("```\n")[1:-1:2]
        shown = [(blocks[i], blocks[i + 1]) for i in (0, 2)]
        for given, printed in shown:
            assert given not in row.data["inputs"]
            assert run(TASK.solution(row), row.data, given, monkeypatch) == printed


@each_level
def test_prompts_show_the_steps_and_the_examples_and_nothing_else(number: int) -> None:
    """A prompt is a function of these, so that it cannot tell hidden outputs."""
    for row in rows(number):
        data = row.data
        shown = [(given, value) for given, value in data["examples"]]
        assert statement(parse_steps(data["steps"]), data.get("fn_name"), shown) == row.prompt
        assert row.prompt.endswith("begins with ```python and ends with ```.")
        assert data.get("fn_name", "standard input") in row.prompt
        for hidden in map(str, data["inputs"]):
            assert len(hidden) < 12 or hidden.strip("[]\n") not in row.prompt


@each_level
def test_edge_cases_are_among_the_hidden_tests(number: int) -> None:
    for row in rows(number):
        kind = parse_steps(row.data["steps"]).kind
        for edge in kind.edges:
            if "fn_name" in row.data:
                start = edge if len(kind.arguments) > 1 else [edge]
                held = [given[: len(start)] for given in [*row.data["inputs"]]]
            else:
                start = kind.write(edge)
                held = [given[: len(start)] for given in row.data["inputs"]]
            assert start in held or any(edge in given for given, _ in row.data["examples"])


@each_level
def test_rows_are_small_plain_data(number: int) -> None:
    for row in rows(number):
        check_json(row.data, row.id)
        assert len(json.dumps([row.prompt, row.data])) < 16 * 1024
        again = replace(row, data=json.loads(json.dumps(row.data)))
        assert again == row
        assert TASK.solution(again) == TASK.solution(row)
        assert row.data["level"] == number == level_of(row.length)


def test_rows_are_pinned_in_every_process() -> None:
    drawn = set()
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", DIGEST]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True)
        drawn.add(done.stdout.decode().strip())
    assert drawn == {"24af0d51b32a358c"}


@pytest.mark.parametrize(("number", "least"), [(1, 60), (2, 80), (3, 95), (4, 105), (5, 75)])
def test_compositions_vary(number: int, least: int) -> None:
    drawn = rows(number, min(120, SEEDS[number]))
    compositions = {tuple(name for name, _ in row.data["steps"]) for row in drawn}
    assert len(compositions) >= least
    assert len({row.prompt for row in drawn}) == len(drawn)
    functions = sum("fn_name" in row.data for row in drawn)
    assert 0.3 * len(drawn) < functions < 0.7 * len(drawn)


def test_every_operation_has_a_reference_and_mistakes_in_its_code() -> None:
    assert {name.removesuffix("_each") for name in OPERATIONS} == {*REFERENCE}
    for operation in OPERATIONS.values():
        assert operation.mistakes
        assert all(right in operation.code for right, _ in operation.mistakes), operation.name


def test_levels_get_longer() -> None:
    lengths = [sum(len(TASK.solution(row)) for row in rows(number, 30)) for number in range(1, 7)]
    assert lengths == sorted(lengths)
    assert [level_of(level.shortest) for level in LEVELS] == [1, 2, 3, 4, 5, 6]
    assert level_of(TASK.lengths[1]) == 6


def test_other_rows_and_changed_rows_are_refused() -> None:
    row = TASK.row(0, 150)
    other = replace(row, family="riddles")
    call = replace(row, data={**row.data, "fn_name": "f(): pass\ndef g"})
    changed = replace(row, data={**row.data, "steps": [["keep_greater", {"k": "print()"}]]})
    for bad, message in ((other, "riddles"), (call, "name a function"), (changed, "cannot be")):
        for ask in (TASK.solution, TASK.wrong_solutions):
            with pytest.raises(ValueError, match=message):
                ask(bad)
    for seed, length in ((-1, 100), (0, 49), (0, 801), (0, 100.0), (True, 100)):
        with pytest.raises(ValueError, match="code:"):
            TASK.row(seed, length)
