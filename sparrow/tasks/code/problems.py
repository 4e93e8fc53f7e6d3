"""Tests of a programming problem, read from the columns that datasets have.

    {"inputs": [...], "outputs": [...]}                       stdin and stdout (APPS, TACO, verl)
    {"inputs": [...], "outputs": [...], "fn_name": "f"}       arguments and values of a function
    [{"input": ..., "output": ..., "type": "stdin"}, ...]     the same, one by one (LiveCodeBench)
    {"test": "def check(f): ...", "entry_point": "f", "prompt": "..."}        HumanEval
    {"test_list": ["assert f(1) == 2", ...], "test_setup_code": "..."}        MBPP

also as JSON text. An expected output may be {"any": [...]}: each of them is right.
"""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMS = (
    "inputs and outputs (with fn_name for calls of a function), test and entry_point, or test_list"
)
MOST_TESTS = 10_000
Truth = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StdioTests:
    """Texts for stdin, and what the program should write."""

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments of a function, and what it should return.

    wrapped: every output is a list that holds the value, as in APPS.
    """

    function: str
    inputs: tuple[Sequence[Any], ...]
    outputs: tuple[Any, ...]
    wrapped: bool


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Sources that raise if a test fails.

    prefix: trusted source that they need; names: functions of the solution that they call.
    """

    prefix: str
    names: tuple[str, ...]
    tests: tuple[str, ...]


Problem = StdioTests | CallTests | AssertTests


def is_problem(truth: Any) -> bool:
    """Whether a ground truth has the columns of a programming problem."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            return False
    if isinstance(truth, Sequence) and not isinstance(truth, str) and truth:
        return isinstance(truth[0], Mapping) and {"input", "output"} <= truth[0].keys()
    if not isinstance(truth, Mapping):
        return False
    return any(
        keys <= truth.keys()
        for keys in ({"inputs", "outputs"}, {"test", "entry_point"}, {"test_list"})
    )


def problem_columns(row: Truth) -> Any:
    """The tests that a row has in columns of its own, as HumanEval, MBPP, APPS and TACO do."""
    if row.get("input_output"):
        return row["input_output"]
    if row.get("test") and row.get("entry_point"):
        return {name: row.get(name) or "" for name in ("prompt", "test", "entry_point")}
    if row.get("test_list"):
        names = ("test_list", "test_setup_code", "test_imports")
        return {name: row[name] for name in names if row.get(name)}
    return None


def parse_problem(truth: Any) -> Problem:
    """Read the tests of a ground truth; ValueError says what is wrong with it."""
    if isinstance(truth, str):
        truth = json.loads(truth)
    if isinstance(truth, Sequence):
        truth = _joined(truth)
    if not isinstance(truth, Mapping):
        raise ValueError(f"expected tests as {FORMS}, got {truth!r:.80}")
    if "inputs" in truth and "outputs" in truth:
        return _examples(truth)
    if "test" in truth and "entry_point" in truth:
        return _check_function(truth)
    if "test_list" in truth:
        return _asserts(truth)
    raise ValueError(f"expected tests as {FORMS}, got the keys {', '.join(map(str, truth)):.80}")


def _joined(tests: Sequence[Any]) -> Truth:
    """Tests one by one as lists of inputs and outputs."""
    if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
        raise ValueError("expected objects with input and output")
    kinds = {str(test.get("type", test.get("testtype", "stdin"))) for test in tests}
    joined = {f"{name}s": [test[name] for test in tests] for name in ("input", "output")}
    if any(kind.startswith("func") for kind in kinds):
        metadata = tests[0].get("metadata") or tests[0]
        name = next((metadata[k] for k in ("func_name", "fn_name") if metadata.get(k)), None)
        if name is None:
            raise ValueError("tests of a function need its func_name")
        return {**joined, "fn_name": name}
    return joined


def _examples(truth: Truth) -> StdioTests | CallTests:
    inputs, outputs = truth["inputs"], truth["outputs"]
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ValueError(f"{name} must be a list that is not empty, got {values!r:.80}")
    if len(inputs) != len(outputs) or len(inputs) > MOST_TESTS:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs, at most {MOST_TESTS}")
    function = truth.get("fn_name")
    if not function:
        return StdioTests(tuple(map(_text, inputs)), tuple(outputs))
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    calls = tuple(map(_arguments, inputs))
    if any(isinstance(value, str) for value in inputs):  # then its values are JSON texts as well
        outputs = [_literal(output) for output in outputs]
    return CallTests(str(function), calls, tuple(outputs), wrapped)


def _text(value: Any) -> str:
    """A text, or lines of one."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _arguments(value: Any) -> Sequence[Any]:
    """Arguments as a list, or as JSON texts, one a line."""
    if isinstance(value, str):
        return [_literal(line) for line in value.split("\n") if line.strip()]
    if not isinstance(value, Sequence):
        raise ValueError(f"the inputs of a function must be lists of arguments, got {value!r:.80}")
    return value


def _literal(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _check_function(truth: Truth) -> AssertTests:
    """HumanEval: a prompt that defines what tests may use, and a function that checks another."""
    name = str(truth["entry_point"])
    if not name.isidentifier():
        raise ValueError(f"entry_point must be the name of a function, got {name!r:.80}")
    test = f"{truth['test']}\ncheck({name})"
    return AssertTests(_source(truth.get("prompt") or ""), (name,), (_source(test),))


def _asserts(truth: Truth) -> AssertTests:
    tests = truth["test_list"]
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f"test_list must be a list that is not empty, got {tests!r:.80}")
    lines = [str(line) for line in truth.get("test_imports") or ()]
    prefix = "\n".join([*lines, str(truth.get("test_setup_code") or "")])
    sources = tuple(_source(test) for test in tests)
    return AssertTests(_source(prefix), _free_names(prefix, sources), sources)


def _source(text: Any) -> str:
    """Source of tests; ValueError if it is no Python."""
    try:
        ast.parse(str(text))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are no Python: {error}") from error
    return str(text)


def _free_names(prefix: str, tests: Sequence[str]) -> tuple[str, ...]:
    """Names that tests use and nobody but the solution can define."""
    used, bound = set[str](), set(dir(builtins))
    for source in (prefix, *tests):
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=given):
                    bound.add(given or name.partition(".")[0])
                case ast.ExceptHandler(name=str(name)):
                    bound.add(name)
    return tuple(sorted(used - bound))
