"""What runs inside of a sandbox: limits, then a program, a server of its functions, or tests.

Only the standard library, in one file: it is copied into the sandbox. The judge outside shares
`pack` and `unpack`, through which values cross the wall as JSON; nothing is pickled.

Modes, by the settings in argv:

    script  run PROGRAM as a program: stdin and stdout are its own
    calls   run PROGRAM, then answer calls of its functions: a line of JSON each
    tests   run the tests in PROGRAM (JSON); the functions that they test are calls, which the
            judge takes to another sandbox: tests and solution never share a process
"""

import builtins
import io
import json
import os
import sys
import types
from collections.abc import Callable
from itertools import islice
from typing import Any, TextIO

PROGRAM = "/mnt/program.py"
MOST_ITEMS = 100_000  # of an iterator
NONCE_BYTES = 33  # 32 digits and the end of the line
SCALARS = (bool, int, str, type(None))
# Landlock: rights to files (ABI 1 to 5), of which reading and running are given.
ALL_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
READ, WRITE = 1 << 0 | 1 << 2 | 1 << 3, 1 << 1 | 1 << 14  # execute, read, list; write, truncate
READ_FILE = 1 << 0 | 1 << 2  # of a path that is a file
NETWORK, SCOPES = 3, 3  # bind and connect by TCP (ABI 4); abstract sockets and signals (ABI 6)
NEWEST = 5  # ABI whose file rights are known here
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # of prctl


# Values.


def pack(value: Any) -> Any:
    """Make JSON of a value; TypeError if it is no plain data."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is float:
        return value if value - value == 0 else {"float": repr(value)}
    if kind is list:
        return [pack(item) for item in value]
    if isinstance(value, SCALARS[:3]):  # an enumeration of numbers, a text with methods
        return pack(int(value) if isinstance(value, int) else str.__str__(value))
    if isinstance(value, float):
        return pack(float(value))
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [pack(value.real), pack(value.imag)]}
    for name, base in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, base):
            return {name: [pack(item) for item in value]}
    if hasattr(value, "__iter__"):  # map, range, a generator, a deque
        return {"iterator": [pack(item) for item in islice(value, MOST_ITEMS)]}
    raise TypeError(f"a value of type {kind.__name__} cannot leave the sandbox")


def unpack(value: Any) -> Any:
    """The value that `pack` made JSON of; ValueError if it made no such thing."""
    try:
        return _unpack(value)
    except RecursionError as error:
        raise ValueError("a value that is too deep") from error


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        return _MAKERS[kind](content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError("not a packed value") from error


def _all(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("expected a list")
    return [_unpack(item) for item in content]


def _key(value: Any) -> Any:
    """An element of a set or a key; whole numbers that can be made to hash alike are refused."""
    if isinstance(value, int) and abs(value) >= sys.hash_info.modulus:
        raise ValueError("a key that is too large")
    return value


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda text: {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}[text],
    "tuple": lambda content: tuple(_all(content)),
    "set": lambda content: set(map(_key, _all(content))),
    "frozenset": lambda content: frozenset(map(_key, _all(content))),
    "iterator": _all,
    "dict": lambda content: {_key(_unpack(key)): _unpack(item) for key, item in content},
    "bytes": bytes.fromhex,
    "complex": lambda content: complex(*_all(content)),
}


# Limits.


def limit(settings: dict[str, Any]) -> None:
    """Give up what the program must not have, for good."""
    if settings.get("rlimits"):
        _set_rlimits(settings)
    if settings.get("landlock"):
        _restrict_files(settings["landlock"], settings.get("scratch"))
    if settings.get("seccomp"):
        _filter_calls(bytes.fromhex(settings["seccomp"]))


def _set_rlimits(settings: dict[str, Any]) -> None:
    import resource

    cpu, memory = settings["cpu"], settings["memory"]
    scratch = settings.get("scratch", 0)
    for name, soft, hard in (
        ("CPU", cpu, cpu),  # by SIGKILL: the first process of a namespace ignores SIGXCPU
        ("AS", memory, memory),
        ("FSIZE", scratch, scratch),
        ("NPROC", settings["threads"], settings["threads"]),
        ("NOFILE", 64, 64),
        ("CORE", 1, 1),  # at 0 the handler of core dumps outside is still run
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        present = resource.getrlimit(kind)
        if 0 <= present[1] < hard:
            soft = hard = present[1]
        if present != (soft, hard):  # gVisor lets nobody set some of them
            resource.setrlimit(kind, (soft, hard))


def _restrict_files(paths: list[str], scratch: int | None) -> None:
    """Landlock: read below these paths, write to the scratch folder, no TCP, no signals."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict = 444, 445, 446  # numbers of the calls, the same on all machines

    def call(number: int, *words: Any) -> int:
        result = libc.syscall(number, *words)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"landlock call {number}")
        return result

    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    abi = call(create, None, ctypes.c_size_t(0), 1)
    files = ALL_FILES.get(min(abi, NEWEST), (1 << 16) - 1)
    ruleset = struct.pack("=QQQ", files, NETWORK, SCOPES)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = call(create, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    rights = {**dict.fromkeys(paths, READ), "/dev/null": READ | WRITE}
    if scratch:
        rights["/tmp"] = files & ~(1 << 0)
    for path, right in rights.items():
        if not os.path.exists(path):
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            right &= READ_FILE | WRITE
        rule = struct.pack("=QI", right & files, opened)
        call(add, rules, 1, rule, 0)
        os.close(opened)
    call(restrict, rules, 0)
    os.close(rules)


def _filter_calls(program: bytes) -> None:
    """Seccomp, where the backend has no way to set it: a filter as BPF, for this process."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(program, len(program))
    count, padding = len(program) // 8, 6
    described = struct.pack(f"=H{padding}xQ", count, ctypes.addressof(instructions))
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.prctl(SECCOMP, FILTER, described, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


# A solution.


def run_program(source: str, name: str) -> dict[str, Any]:
    """Run source as a module of its own, and return its namespace."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as by `site`, which is not loaded
    module = types.ModuleType(name)
    module.__file__ = PROGRAM
    sys.modules[name] = module
    if "class Solution" in source:  # where LeetCode runs it, the names of `typing` are there
        exec("from typing import *", module.__dict__)
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    return module.__dict__


def serve_calls(source: str) -> None:
    """Run a solution, then answer calls of its functions; what it prints goes to stderr."""
    inbox, outbox = _own_channels()
    try:
        namespace = run_program(source, "solution")
        _say(outbox, {"ready": True})
    except BaseException as error:
        _say(outbox, _raised(error))
        os._exit(1)
    for line in inbox:
        _say(outbox, _answer(namespace, json.loads(line)))


def _answer(namespace: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = _function(namespace, request["call"])
        if function is None:
            return {"raised": "NameError", "message": f"name {request['call']!r} is not defined"}
        args = [unpack(value) for value in request["args"]]
        named = {name: unpack(value) for name, value in request.get("named", {}).items()}
        value = pack(function(*args, **named))
        return {"value": value, "args": [_changed(arg) for arg in args if request.get("changes")]}
    except BaseException as error:
        return _raised(error)


def _function(namespace: dict[str, Any], name: str) -> Any:
    """A function, or a method of the class Solution, as LeetCode has them."""
    if name in namespace:
        return namespace[name]
    if isinstance(solution := namespace.get("Solution"), type):
        return getattr(solution(), name, None)
    return None


def _changed(arg: Any) -> Any:
    """An argument that a call may have changed; None: none of that kind."""
    return pack(arg) if isinstance(arg, list | dict | set) else None


def _raised(error: BaseException) -> dict[str, str]:
    kind = next((c.__name__ for c in type(error).__mro__ if hasattr(builtins, c.__name__)), "")
    return {"raised": kind or "Exception", "message": f"{error!s:.200}"}


def _own_channels() -> tuple[TextIO, TextIO]:
    """Take stdin and stdout for messages; the program has no stdin, and stderr as stdout."""
    if sys.platform == "wasi":  # no dup
        inbox, outbox = (
            os.fdopen(0, encoding="utf-8", closefd=False),
            os.fdopen(1, "w", closefd=False),
        )
        sys.stdin, sys.stdout = io.StringIO(), sys.stderr
        return inbox, outbox
    inbox, outbox = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return inbox, outbox


def _say(outbox: TextIO, message: dict[str, Any]) -> None:
    outbox.write(json.dumps(message) + "\n")
    outbox.flush()


# Tests.


def run_tests(source: str, nonce: str) -> None:
    """Run tests one after the other; the functions of the solution are calls to the judge.

    source: JSON: prefix (source that defines what tests need), names (functions of the solution),
    entry (those of them that the prefix defines too, as stubs), tests (sources).
    """
    inbox, outbox = _own_channels()
    problem = json.loads(source)

    def call(name: str, *args: Any, **named: Any) -> Any:
        packed: dict[str, Any] = {"args": [pack(arg) for arg in args], "changes": True}
        packed["named"] = {key: pack(value) for key, value in named.items()}
        _say(outbox, {"call": name, **packed})
        reply = json.loads(inbox.readline())
        if "raised" in reply:
            raise exception_type(reply["raised"])(reply["message"])
        for arg, changed in zip(args, reply["args"], strict=False):
            if changed is not None:
                _put(arg, unpack(changed))
        return unpack(reply["value"])

    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(problem["prefix"], "<prefix>", "exec"), namespace)
    own = namespace.keys() - set(
        problem.get("entry", ())
    )  # what the prefix defines stays the tests'
    names = set(problem["names"]) - own
    if not names:
        raise NameError("the tests call no function of a solution")
    for name in names:
        namespace[name] = lambda *args, _name=name, **named: call(_name, *args, **named)
    for number, test in enumerate(problem["tests"]):
        reason = ""
        try:
            exec(compile(test, f"<test {number + 1}>", "exec"), namespace)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error!s:.200}".rstrip(": ")
        _say(outbox, {"test": number, "nonce": nonce, "reason": reason})


def exception_type(name: Any) -> type[BaseException]:
    """A built-in exception by its name; the name comes from a solution, and nothing else counts."""
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return Exception
    ends_loops = issubclass(kind, StopIteration | StopAsyncIteration)  # of the tests
    return RuntimeError if ends_loops else kind


def _put(arg: Any, changed: Any) -> None:
    """Give an argument the content that it has after a call in the solution."""
    if isinstance(arg, list):
        arg[:] = changed
    elif isinstance(arg, dict | set):
        arg.clear()
        arg.update(changed)


def _read(settings: dict[str, Any]) -> str:
    """The program: in a file, or by a descriptor."""
    with open(settings.get("program", PROGRAM), encoding="utf-8") as file:
        return file.read()


def _leave_if_alone() -> None:
    """End if nobody reads stdout: the judge was killed while this started."""
    if sys.platform != "wasi":
        import select

        reader = select.poll()
        reader.register(1, 0)
        if reader.poll(0):
            os._exit(1)


def main() -> None:
    _leave_if_alone()
    settings = json.loads(sys.argv[1])
    sys.set_int_max_str_digits(0)  # CPU time is limited anyway
    sys.argv[:] = ["program.py"]
    nonce = os.read(0, NONCE_BYTES).decode().strip() if settings["mode"] == "tests" else ""
    source = settings["source"] if "source" in settings else _read(settings)
    limit(settings)
    if settings["mode"] == "script":
        run_program(source, "__main__")
    elif settings["mode"] == "calls":
        serve_calls(source)
    else:
        run_tests(source, nonce)


if __name__ == "__main__":
    main()
