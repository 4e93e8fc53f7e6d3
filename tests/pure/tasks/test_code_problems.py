"""Rows of programming problems: the forms that datasets have, programs in texts, comparisons."""

import json
from dataclasses import replace

import pytest

from sparrow.tasks.code.comparing import same_output, same_value
from sparrow.tasks.code.judging import extract_program
from sparrow.tasks.code.problems import (
    AssertTests,
    CallTests,
    StdioTests,
    is_problem,
    parse_problem,
)
from sparrow.tasks.rows import parse_row

STDIO = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
CHECK = {
    "prompt": "def add(a, b):\n    '''Add.'''\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
    "entry_point": "add",
}
ASSERTS = {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import math"}


@pytest.mark.parametrize("truth", [STDIO, CALLS, CHECK, ASSERTS])
@pytest.mark.parametrize("as_text", [False, True])
def test_tests_are_read_in_every_form(truth: dict[str, object], as_text: bool) -> None:
    given = json.dumps(truth) if as_text else truth
    assert is_problem(given)
    kinds = {"inputs": StdioTests, "fn_name": CallTests}
    kind = next((kinds[key] for key in ("fn_name", "inputs") if key in truth), AssertTests)
    assert isinstance(parse_problem(given), kind)


@pytest.mark.parametrize("truth", ["7", "[1, 2]", ["7"], {"answer": 1}, 7, None, "{"])
def test_other_ground_truths_are_no_problems(truth: object) -> None:
    assert not is_problem(truth)


def test_tests_one_by_one() -> None:
    stdio = parse_problem([{"input": "1", "output": "2", "type": "stdin_stdout"}])
    assert stdio == StdioTests(("1",), ("2",))
    test = {"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional"}
    for metadata in ({"func_name": "f"}, '{"func_name": "f"}'):
        calls = parse_problem([{**test, "metadata": metadata}])
        assert calls == CallTests("f", ([[1, 2], "x"],), (True,), False)


def names(*tests: str, setup: str = "") -> tuple[str, ...]:
    problem = parse_problem({"test_list": list(tests), "test_setup_code": setup})
    assert isinstance(problem, AssertTests)
    return problem.names


def test_names_of_the_solution_are_those_that_nobody_else_defines() -> None:
    tests = ["assert math.isclose(area(2), 4)", "x = [side(i) for i in range(3)]\nassert sum(x)"]
    assert names(*tests, setup="import math") == ("area", "side")


@pytest.mark.parametrize(
    ("test", "setup"),
    [
        ("assert f(helper())", "async def helper(): return 3"),
        ("assert f(lambda g: g(1)) == [h for h in ()]", ""),
        ("assert [last := f(n) for n in (1, 2)] and last", ""),
        (
            "match f(1):\n    case {1: a, **b}: assert a and b\n    case [c, *d]: assert c + d",
            "",
        ),
        ("class C:\n    y = f(1)\n    def m(self): return C\nassert C().m()", ""),
        ("with open(f(1)) as file: assert file", ""),
        ("assert run(1)", "def run(x, *args, y=2): return f(x, y, args)"),
        ("assert f(count)", "def up():\n    global count\n    count = 1\nup()"),
        ("assert all(map(f, [1]))", ""),
    ],
)
def test_names_that_tests_bind_are_not_the_solution(test: str, setup: str) -> None:
    assert names(test, setup=setup) == ("f",)


def test_a_name_that_one_test_binds_in_a_scope_is_free_in_another() -> None:
    assert names("assert (lambda f: f)(1)", "assert f(1)") == ("f",)


def test_a_function_under_test_may_be_named_like_a_builtin() -> None:
    assert names("assert sum(10, 15) == 6", "assert abs(sum(4, 6)) == 3") == ("sum",)
    assert names("assert sum(f(1)) == 6", "assert sum(f(2)) == 6") == ("f",)


def test_an_entry_point_replaces_the_stub_of_its_prompt() -> None:
    problem = parse_problem(CHECK)
    assert isinstance(problem, AssertTests)
    assert problem.names == problem.entry == ("add",)
    chat = [{"role": "user", "content": "Add."}]
    assert parse_problem({**CHECK, "prompt": chat}) == replace(problem, prefix="")


@pytest.mark.parametrize(
    "truth",
    [
        {"test_list": ["assert True"]},
        {"test_list": ["assert g(1) == 1"], "test_setup_code": "def g(x): return x"},
        {"test_list": ["assert list(range(3))"]},
        {"test_list": ["assert math.sqrt(4) == 2"], "test_imports": ["import math"]},
        {"test": "def check(candidate): pass", "entry_point": "f"},
    ],
)
def test_tests_that_call_no_solution_are_refused(truth: object) -> None:
    with pytest.raises(ValueError, match="no function of a solution"):
        parse_problem(truth)


@pytest.mark.parametrize(
    "truth",
    [
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": "1", "outputs": "2"},
        {"fn_name": "f", "inputs": [3], "outputs": [3]},
        {"test": "def check(", "entry_point": "f"},
        {"test": "pass", "entry_point": "f; import os"},
        {"test_list": []},
        {"test_list": ["assert ("]},
        [{"input": "1", "output": "2", "type": "functional"}],
        [{"input": "1", "output": "2", "type": "functional", "metadata": "[]"}],
        [{"input": "1", "output": "2", "type": "functional", "metadata": ["f"]}],
        {"inputs": [5], "outputs": ["5"]},
        {"inputs": [None], "outputs": ["5"]},
        {"inputs": [{"a": 1}], "outputs": ["5"]},
        {"fn_name": 5, "inputs": [[1]], "outputs": [1]},
        {"fn_name": "a.b", "inputs": [[1]], "outputs": [1]},
        {"test": CHECK["test"], "entry_point": "None"},
        {"test": CHECK["test"], "entry_point": 5},
        {"test": "x = 1", "entry_point": "f"},
        {"test": 5, "entry_point": "f"},
        {"test": CHECK["test"], "entry_point": "add", "prompt": 5},
        {"test_list": "assert f(1)"},
        {"test_list": 5},
        {"test_list": [5]},
        {"test_list": ["assert f(1)"], "test_imports": 5},
        {"test_list": ["assert f(1)"], "test_setup_code": {"a": 1}},
        {"test_list": ["assert f(1)\0"]},
        {"test_list": ["assert " + "-" * 100_000 + "f(1)"]},
        {"test_list": ["assert f" + ".a" * 100_000]},
        {"test_list": ["assert f" + "(1)" * 5000]},
        {"inputs": [b"1"], "outputs": ["1"]},
        {"inputs": ["\ud800"], "outputs": ["1"]},
        {"inputs": ["1"], "outputs": [{"any": ["\ud800"]}]},
        {"test_list": ["assert f('\ud800')"]},
        '{"inputs": ["\\ud800"], "outputs": ["1"]}',
        {"fn_name": "f", "inputs": ['"\\ud800"'], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ['"\\ud800"']},
        "[" * 100_000,
        "hello",
        {},
        3,
        None,
    ],
)
def test_broken_tests_are_refused(truth: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_problem(truth)


def test_columns_of_datasets() -> None:
    rows = [
        {"prompt": "p", "test": CHECK["test"], "entry_point": "add"},
        {"prompt": "p", "test_list": ["assert f() == 1"]},
        {"question": "p", "input_output": json.dumps(STDIO)},
        {"prompt": "p", "reward_model": {"ground_truth": json.dumps(CALLS)}},
    ]
    assert all(is_problem(parse_row(row, 0).ground_truth) for row in rows)


def test_the_last_block_of_python_after_the_thoughts_is_the_program() -> None:
    text = (
        "<think>```python\nno\n```</think>\n```python\na\n```\nthen\n```py\nb\n```\n```text\nc\n```"
    )
    assert extract_program(text) == "b\n"
    assert extract_program("```\nplain\n```") == "plain\n"
    for none in ("x = 1", "```python\nnot closed", "```sh\nls\n```", "</think>"):
        assert extract_program(none) is None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nIts output:\n```\n3\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\r\na\r\n  b\r\n```\r\n", "a\n  b\n"),
        ("1. x\n    ```python\n    if a:\n        b\n\n  c\n    ```", "if a:\n    b\n\nc\n"),
        ("~~~python\na\n```\n~~~", "a\n```\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\na\n`````", "a\n"),
        ("```python\na\n    ```\n```", "a\n    ```\n"),
        ("```python\na\n``` done\n```", "a\n``` done\n"),
        ("``` Python3.11 title=x\na\n```", "a\n"),
        ("```python:a.py\na\n```", "a\n"),
        ("```{.python}\na\n```", "a\n"),
        ("\t```python\n\ta\n\t\tb\n\t```", "a\n\tb\n"),
        ("```python\n```", ""),
        ("```pythonic\na\n```", None),
        ("```python `x`\na\n```", None),
        ("````python\na\n```", None),
        ("```python\na\n~~~", None),
        ("```python\na```", None),
        ("```python\n" + "x" * (1 << 20) + "\n```", None),
    ],
)
def test_blocks_are_fenced_as_markdown_has_it(text: str, program: str | None) -> None:
    assert extract_program(text) == program


@pytest.mark.parametrize(
    "part", ["```python\n", " ", "`", "```a", "~~~ \n", "\n", "\r", "```\n~~~\n"]
)
def test_a_program_is_looked_for_in_linear_time(part: str) -> None:
    """A text for which an expression with backtracking would take days."""
    extract_program("```python\n" + part * (2_000_000 // len(part)))


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("1 2\n3", " 1  2 \n\n3\n", True),
        ("1 2", "1 3", False),
        ("1 2", "1 2 3", False),
        ("0.5", "0.5000001", True),
        ("0.5", "0.51", False),
        ("10", "10.0", True),
        ("-10", "-10.", True),
        ("10", "10.01", False),
        ("10", "11", False),
        ("7", "007", False),
        ("007", "7", False),
        ("0011", "11.0", False),
        ("12", "+12", False),
        ("1000", "1e3", False),
        ("1000", "1_000", False),
        ("1000.0", "1_000.0", False),
        ("3", "\u0663", False),
        ("3.5", "\u0663.5", False),
        ("1e5", "100000", False),  # may be hexadecimal
        ("1e-05", "0.00001", True),  # as Python writes it
        ("2.0", "2", True),
        ("0.5", "5e-1", True),
        ("1000000", "1000001", False),  # whole numbers have no tolerance
        ("nan", "nan", True),
        (["a", "b"], "a\nb", True),
        ({"any": ["yes", "no"]}, "no", True),
        ({"any": ["yes", "no"]}, "maybe", False),
        ("", "", True),
        ("1e400", "2e400", False),
    ],
)
def test_outputs_are_compared_by_words(expected: object, got: str, same: bool) -> None:
    assert same_output(expected, got, 1e-6) is same


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ([1, [2, 3]], (1, (2, 3)), True),
        ({"1": 2}, {1: 2}, True),
        ({"1": 2}, {1: 2, 3: 4}, False),
        ({"1": 2}, {"1": 1, 1: 2}, False),
        ({"null": 1, "true": 2, "0.5": 3}, {None: 1, True: 2, 0.5: 3}, True),
        ({"1": 2}, {True: 2}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3, "3", False),
        (True, 1, True),
        (0, False, True),
        (0, None, False),
        ([1, 2], [2, 1], False),
        (None, None, True),
        ({"any": [1, 2]}, 2, True),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_json(expected: object, got: object, same: bool) -> None:
    assert same_value(expected, got, 1e-6) is same
