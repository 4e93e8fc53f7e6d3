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
import symtable
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

FORMS = (
    "inputs and outputs (with fn_name for calls of a function), test and entry_point, or test_list"
)
NO_CALL = "the tests call no function of a solution"
MOST_TESTS = 10_000
CALLED = {"func", "functional", "function"}  # kinds of tests one by one
KINDS = CALLED | {"stdin", "stdio", "stdin_stdout"}
BUILTINS = frozenset(dir(builtins))
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

    prefix: trusted source that they need
    names: functions of the solution, unless the prefix defines them (`from math import *`)
    entry: those of them that the prefix defines too, as a stub
    """

    prefix: str
    names: tuple[str, ...]
    tests: tuple[str, ...]
    entry: tuple[str, ...] = ()


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
    try:
        return _parse(_checked(json.loads(truth) if isinstance(truth, str) else truth))
    except (SyntaxError, RecursionError, MemoryError) as error:  # of Python's parser
        raise ValueError(f"the tests cannot be read: {type(error).__name__} {error}") from error


def _parse(truth: Any) -> Problem:
    if isinstance(truth, Sequence) and not isinstance(truth, str):
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


def _checked(value: Any) -> Any:
    """Refuse what is no JSON, or has text that is no UTF-8: lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the tests are no JSON in UTF-8: {error}") from error
    return value


def _joined(tests: Sequence[Any]) -> Truth:
    """Tests one by one as lists of inputs and outputs."""
    if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
        raise ValueError("expected objects with input and output")
    kinds = {str(test.get("type", test.get("testtype", "stdin"))) for test in tests}
    if len(kinds) > 1 or not kinds <= KINDS:
        raise ValueError(f"type must be one of {', '.join(sorted(KINDS))}, got {sorted(kinds)}")
    joined = {f"{name}s": [test[name] for test in tests] for name in ("input", "output")}
    if kinds & CALLED:
        metadata = _literal(tests[0].get("metadata") or tests[0])
        if not isinstance(metadata, Mapping):
            raise ValueError(f"metadata must be an object, got {metadata!r:.80}")
        name = metadata.get("func_name") or metadata.get("fn_name")
        if not name:
            raise ValueError("tests of a function need its func_name")
        return {**joined, "fn_name": name}
    return joined


def _examples(truth: Truth) -> StdioTests | CallTests:
    inputs, outputs = truth["inputs"], truth["outputs"]
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ValueError(f"{name} must be a list that is not empty, got {values!r:.80}")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if len(inputs) > MOST_TESTS:
        raise ValueError(f"{len(inputs)} tests, at most {MOST_TESTS}")
    for output in outputs:
        several = isinstance(output, Mapping) and output.keys() == {"any"}
        if several and not (isinstance(output["any"], list) and output["any"]):
            raise ValueError(f"any must be a list that is not empty, got {output['any']!r:.80}")
    if not truth.get("fn_name"):
        return StdioTests(tuple(map(_text, inputs)), tuple(outputs))
    function = _function_name(truth, "fn_name")
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    calls = tuple(map(_arguments, inputs))
    if any(isinstance(value, str) for value in inputs):  # then its values are JSON texts as well
        outputs = [_literal(output) for output in outputs]
    return CallTests(function, calls, tuple(outputs), wrapped)


def _text(value: Any) -> str:
    """A text, or lines of one."""
    if not isinstance(value, str | list | tuple):
        raise ValueError(f"the inputs of a program must be texts or lines, got {value!r:.80}")
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
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
    return _checked(value)


def _function_name(truth: Truth, column: str) -> str:
    name = truth[column]
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise ValueError(f"{column} must be the name of a function, got {name!r:.80}")
    return name


def _check_function(truth: Truth) -> AssertTests:
    """HumanEval: a prompt that defines what tests may use, and a function that checks another."""
    name, test = _function_name(truth, "entry_point"), _column(truth, "test")
    chat = isinstance(truth.get("prompt"), list)  # messages of a row: they define nothing
    prompt = "" if chat else _column(truth, "prompt")
    ast.parse(prompt)
    tree = ast.parse(test)
    candidates = {
        node.args.args[0].arg
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args
    }
    if not candidates:
        raise ValueError("test must define check(candidate)")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not used & {name, *candidates}:
        raise ValueError(NO_CALL)
    return AssertTests(prompt, (name,), (f"{test}\ncheck({name})",), (name,))


def _asserts(truth: Truth) -> AssertTests:
    """MBPP: asserts that call functions of the solution."""
    tests = truth["test_list"]
    if isinstance(tests, str) or not tests or not _column(truth, "test_list"):
        raise ValueError(f"test_list must be a list that is not empty, got {tests!r:.80}")
    prefix = "\n".join(_column(truth, name) for name in ("test_imports", "test_setup_code"))
    return AssertTests(prefix, _names_of_solution(prefix, tests), tuple(tests))


def _column(truth: Truth, name: str) -> str:
    """The text of a column, or its lines; empty if the row has none."""
    value = truth.get(name) or []
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{name} must be a text or a list of texts, got {value!r:.80}")
    return "\n".join(lines)


def _names_of_solution(prefix: str, tests: Sequence[str]) -> tuple[str, ...]:
    """Names that tests use and nobody but the solution can define.

    If there are none, the function under test may be named like a builtin, and shadow it: then it
    is the one that every test calls.
    """
    used, bound = set[str](), set[str]()
    for source in (prefix, *tests):
        tables = [symtable.symtable(source, "<tests>", "exec")]
        for table in tables:  # grows
            tables += table.get_children()
            for symbol in filter(symtable.Symbol.is_global, table.get_symbols()):
                own = symbol.is_assigned() or symbol.is_imported()
                (bound if own else used).add(symbol.get_name())
    names = used - bound - BUILTINS
    if not names:
        names = set.intersection(*map(_called, tests)) & (BUILTINS - bound)
        if len(names) != 1:
            raise ValueError(NO_CALL)
    return tuple(sorted(names))


def _called(source: str) -> set[str]:
    """Names of the functions that a source calls."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}
