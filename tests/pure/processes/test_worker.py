"""Worker processes: only their own answers count, and nothing of them outlives whoever asked."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.leftovers import MARK, SOON, gone, marked, marking
from support.waiting import until

from sparrow.processes.worker import Worker, WorkerFault

ROOT = Path(__file__).parents[3]
PATIENT = 60.0
HANDLER = r"""
import ctypes, gc, json, os, pickle, signal, socket, subprocess, sys, threading

seen, waiting = [], []

def connections():
    "Every descriptor that could lead to somebody: a hostile handler tries them all."
    known = map(int, os.listdir("/proc/self/fd"))  # with the one that lists them, gone by then
    return [fd for fd in known if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]

def write(data):
    for fd in connections():
        try:
            os.write(fd, data)
        except OSError:
            pass

def question_id():
    "The number of the question that is being answered, as a hostile handler can find it."
    frame = sys._getframe()
    while "question" not in frame.f_locals or "id" not in frame.f_locals["question"]:
        frame = frame.f_back
    return frame.f_locals["question"]["id"]

def forged(number, answer="forged"):
    return json.dumps({"id": number, "answer": answer}).encode() + b"\n"

def later(data, questions):
    "Writes beside the answer to a later question."
    due = threading.Event()
    waiting.append((len(seen) + questions, due))
    threading.Thread(target=lambda: due.wait() and write(data)).start()

def ready():
    "Tells the program that opened the other end of this pipe."
    open(os.environ["READY"], "w").close()

def hang():
    signal.pause()

def stuck():
    ctypes.PyDLL(None).sleep(3600)

def daemon():
    "Forks twice, into a session of its own, and ignores what can be ignored."
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            hang()
        os._exit(0)

def sessions():
    for _ in range(8):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)

def nested():
    code = "import subprocess, signal; subprocess.Popen(['sleep', '3600'], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", f"{code}; signal.pause()"], start_new_session=True)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def forked(file):
    child = os.fork()
    if child == 0:
        with open(file, "w") as out:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in connections()]
            out.write(repr([link for link in links if "socket" in link]))
        os._exit(0)
    os.waitpid(child, 0)

def hold(size):
    return bytearray(size)

THIEF = '''
import ctypes, json, os, socket, sys, threading
owner, say = int(sys.argv[1]), sys.argv[2].encode() + bytes([10])
held = []
for name in os.listdir(f"/proc/{owner}/fd"):
    if os.readlink(f"/proc/{owner}/fd/{name}").startswith("socket:"):
        taken = ctypes.CDLL(None).syscall(438, os.pidfd_open(owner), int(name), 0)  # pidfd_getfd
        if taken >= 0:
            held.append(socket.socket(fileno=taken))
def answer(connection):
    for line in connection.makefile("rb"):
        number = json.loads(line)["id"]
        connection.sendall(json.dumps({"id": number, "answer": "forged"}).encode() + bytes([10]))
for connection in held:
    if sys.argv[2]:
        connection.sendall(say)
    else:
        threading.Thread(target=answer, args=[connection]).start()
print(len(held), flush=True)
'''

def steal(owner, say=""):
    "A program that takes the connections of a process; how many it got."
    thief = subprocess.Popen(
        [sys.executable, "-c", THIEF, str(owner), say], stdout=subprocess.PIPE
    )
    return int(thief.stdout.readline())

def fork_in_c():
    "A fork of which Python does not know, that answers all that comes."
    if ctypes.PyDLL(None).fork() == 0:
        for fd in connections():
            while line := os.read(fd, 1 << 16):
                write(forged(json.loads(line)["id"]))
        os._exit(0)

def children(count, size, before=""):
    code = f"{before}x = b'1' * {size}; import signal; signal.pause()"
    for _ in range(count):
        subprocess.Popen([sys.executable, "-c", code])
    hang()

def make(fail=None):
    if fail == "raise":
        raise RuntimeError("no idea")
    if fail == "exit":
        os._exit(7)
    if fail == "write":
        write(b"{}\n")
    def handler(body):
        seen.append(question_id())
        for due in [event for count, event in waiting if len(seen) >= count]:
            due.set()
        return eval(body) if isinstance(body, str) else body
    return handler
"""


@pytest.fixture(scope="module", autouse=True)
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "hostile_handler.py").write_text(HANDLER)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def mark() -> Iterator[str]:
    with marking() as mark:
        yield mark


@pytest.fixture(params=[True, False], ids=["namespace", "subreaper"])
def worker(request: pytest.FixtureRequest, mark: str) -> Iterator[Worker]:
    made = Worker("hostile_handler:make", {}, namespace=request.param)
    yield made
    made.close()


def fault(worker: Worker, body: str, deadline: float = PATIENT) -> str:
    with pytest.raises(WorkerFault) as caught:
        worker.ask(body, deadline)
    if caught.value.kind != "raised":
        worker.kill()
    return caught.value.kind


def own_or_fault(worker: Worker, body: object) -> object:
    """The answer, or the kind of the fault."""
    try:
        return worker.ask(body, PATIENT)
    except WorkerFault as error:
        worker.kill()
        return error.kind


def test_answers_and_how_it_is_kept_apart(worker: Worker) -> None:
    for body in (1, None, [1.5, {"a": "✓\ud800"}], {"x": "y" * 300_000}):
        assert worker.ask(body, PATIENT) == body
    assert worker.isolation in ("pid namespace", "subreaper")
    first = worker.ask("os.getpid()", PATIENT)
    assert worker.ask("os.getpid()", PATIENT) == first != os.getpid()
    assert (first == 2) == (worker.isolation == "pid namespace")


def test_faults_and_the_next_question(worker: Worker) -> None:
    for body, kind in (
        ("1 / 0", "raised"),
        ("missing", "raised"),
        ("os._exit(3)", "ended"),
        ("sys.exit(4)", "ended"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended"),
        ("ctypes.string_at(0)", "ended"),
        ("hold(2_000_000)", "ended"),  # no JSON
        ("'x' * 2_000_000", "garbled"),  # longer than allowed
    ):
        assert fault(worker, body) == kind, body
        assert worker.ask("'fine'", PATIENT) == "fine", body
    for body in ("hang()", "stuck()", "stopped() or hang()"):
        assert fault(worker, body, 0.5) == "late", body
        assert worker.ask("'fine'", PATIENT) == "fine", body


def test_what_cannot_be_loaded(mark: str) -> None:
    for target, arguments, kind in (
        ("nowhere_at_all:make", {}, "raised"),
        ("hostile_handler:missing", {}, "raised"),
        ("hostile_handler:make", {"fail": "raise"}, "raised"),
        ("hostile_handler:make", {"unknown": 1}, "raised"),
        ("hostile_handler:make", {"fail": "exit"}, "ended"),
        ("hostile_handler:make", {"fail": "write"}, "garbled"),
    ):
        made = Worker(target, arguments)
        with pytest.raises(WorkerFault) as caught:
            made.wait()
        assert caught.value.kind == kind, (target, arguments)
        made.close()


def test_bytes_that_are_no_answer_are_faults_and_never_answers(worker: Worker) -> None:
    harmful = pickle.dumps(pytest.fail)
    writes = [
        "forged(question_id())[:-1]",  # half a line before the answer
        "b'x'",
        "b'\\n'",
        "b'\\n' * 100",
        "b'null\\n'",
        "b'{}\\n'",
        "b'[]\\n'",
        "b'\\xff\\xfe\\n'",
        repr(harmful),
        "pickle.dumps(('forged', None)) + b'\\n'",
        "(12).to_bytes(4, 'big') + b'x' * 12",  # as multiprocessing frames it
        "b'[' * 100_000 + b'\\n'",
        "b'9' * 10_000 + b'\\n'",
        "b'x' * 5_000_000",
        "forged('0' * 32)",
        "forged(None)",
        "forged(question_id()) + b' '",
        "forged(question_id()) * 2",
        "forged(question_id())[:-1] + b'}\\n'",
        "json.dumps({'id': question_id()}).encode() + b'\\n'",
        "json.dumps({'id': question_id(), 'answer': 1, 'more': 2}).encode() + b'\\n'",
        'b\'{"id": "\' + question_id().encode() + b\'", "answer": 1, "answer": 2}\\n\'',
    ]
    for data in writes:
        assert fault(worker, f"write({data}) or 'true answer'", 20) in ("garbled", "late"), data
    assert worker.ask("'fine'", PATIENT) == "fine"


def test_answers_are_never_shifted(worker: Worker) -> None:
    """Bytes that come between questions, with numbers of earlier ones: a fault, no other answer."""
    for data in ("forged(seen[0])", "forged(seen[-1])", "b'x\\n'"):
        for questions in (0, 1, 5):
            own_or_fault(worker, f"later({data}, {questions})")
            for number in range(10):
                assert own_or_fault(worker, number) in (number, "garbled")


def test_it_holds_no_descriptor_but_its_own(worker: Worker, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        names = worker.ask("[os.readlink(f'/proc/self/fd/{fd}') for fd in connections()]", PATIENT)
    assert len(names) == 1
    assert names[0].startswith("socket:")
    standard = worker.ask("[os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]", PATIENT)
    assert standard[0] == os.devnull
    assert standard[1] == standard[2]
    assert standard[1].startswith("pipe:")
    # Nor does what it forks.
    worker.ask(f"forked({str(tmp_path / 'held')!r})", PATIENT)
    assert (tmp_path / "held").read_text() == "[]"


def test_what_it_prints_moves_no_terminal(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.ask(r"print('said \x1b]0;title\x07 \x9b31m aloud')", PATIENT)
    worker.ask(r"os.write(2, b'\xff\xfe more\n')", PATIENT)
    worker.ask("print('x' * 3_000_000)", PATIENT)
    parts: list[str] = []
    until(lambda: parts.append(capfd.readouterr().err) or "more" in "".join(parts), SOON)
    output = "".join(parts)
    assert r"said \x1b]0;title\x07 \x9b31m aloud" in output
    assert not set(output) & {"\x1b", "\x07", "\x9b"}


@pytest.mark.parametrize("size", [4096, 1 << 16, 3_000_000])
def test_output_beyond_its_limit_is_dropped_and_said(
    mark: str, capfd: pytest.CaptureFixture[str], size: int
) -> None:
    """Whether the limit falls between two reads or within one."""
    with closing(Worker("hostile_handler:make", {}, output=4096)) as worker:
        worker.ask(f"os.write(1, b'x' * {size}) and None", PATIENT)
        parts: list[str] = []
        until(lambda: parts.append(capfd.readouterr().err) or "not shown" in "".join(parts), SOON)
        worker.ask("os.write(1, b'y' * 100) and None", PATIENT)
        worker.ask("'fine'", PATIENT)
    output = "".join([*parts, capfd.readouterr().err])
    assert output.count("x") == 4096
    assert output.count("not shown") == 1
    assert "y" not in output


# Other processes that hold its connections.


def test_answers_of_other_processes_are_faults(worker: Worker) -> None:
    for start in ("fork_in_c()", "steal(os.getpid()) and None"):
        worker.ask(start, PATIENT)
        result = []
        for _ in range(6):
            try:
                result.append(worker.ask("'true answer'", 1.0))
            except WorkerFault as error:
                result.append(error.kind)
                worker.kill()
        assert set(result) <= {"true answer", "garbled", "late"}, start
        worker.kill()
        assert worker.ask("'true answer'", PATIENT) == "true answer"


def test_a_question_that_lost_a_part_is_not_answered(worker: Worker) -> None:
    worker.wait()
    assert worker._data is not None
    worker._data.sendall(b"0" * 64 + b' {"id": "x", "body": "1"}\n')
    worker._data.settimeout(PATIENT)
    assert worker._data.recv(100) == b""
    assert worker.ask("'fine'", PATIENT) == "fine"


def test_what_others_write_for_its_supervisor(worker: Worker) -> None:
    for say in ("5", "[" * 5000, '{"ended": "well"}', '{"ended": [', "[1]"):
        with pytest.raises(WorkerFault) as caught:
            worker.ask(f"[steal(os.getppid(), {say!r}), os._exit(3)]", PATIENT)
        assert caught.value.kind == "ended"
        assert "well" not in str(caught.value)
        worker.kill()
    assert worker.ask("'fine'", PATIENT) == "fine"


# Nothing outlives.

EVERYTHING = "daemon() or sessions() or nested()"  # that it can start


def started(worker: Worker, mark: str) -> None:
    worker.wait()
    before = len(marked(mark))
    worker.ask(EVERYTHING, PATIENT)
    assert until(lambda: len(marked(mark)) > before), "nothing was started"


def test_ending_it_at_any_time_prints_nothing(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after a deadline, when the evaluation ends while the next process is starting."""
    for wait in (0.0, 0.03, 0.06, 0.1, 0.15, 0.2):
        worker.start()
        time.sleep(wait)
        worker.kill()
    assert capfd.readouterr().err == ""


def test_what_it_started_ends_with_it(worker: Worker, mark: str) -> None:
    for end in (
        lambda: fault(worker, "hang()", 0.2),
        lambda: fault(worker, "stuck()", 0.2),
        lambda: fault(worker, "os._exit(0)"),
        lambda: fault(worker, "write(b'x')"),
        lambda: fault(worker, "os.kill(os.getppid(), signal.SIGKILL) or hang()", 2.0),
        worker.kill,
    ):
        started(worker, mark)
        end()
        assert gone(mark)
    assert worker.ask("'fine'", PATIENT) == "fine"


def environment() -> dict[str, str]:
    """For programs that find the package and the handlers. Forks beside threads are meant."""
    path = os.pathsep.join([*sys.path, str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore::DeprecationWarning"}


def run_program(code: str, folder: Path, **settings: Any) -> "subprocess.CompletedProcess[str]":
    """A program beside this one; it waits until its worker is `ready`."""
    pipe = folder / "ready"
    if not pipe.exists():
        os.mkfifo(pipe)
        pipe.chmod(0o666)
    given = {"stderr": subprocess.PIPE, "env": environment(), "executable": sys.executable}
    given |= settings
    given["env"] |= {"READY": str(pipe)}
    words = [given.pop("executable"), "-c", code]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, **given)


@contextmanager
def unread(terminal: bool = False) -> Iterator[int]:
    """A pipe whose other end is closed, or a terminal of which nobody reads."""
    reader, writer = os.openpty() if terminal else os.pipe()
    if not terminal:
        os.close(reader)
    yield writer
    os.close(writer)
    if terminal:
        os.close(reader)


PROGRAM = """
import os, signal, sys, threading
from sparrow.processes.worker import Worker
worker = Worker("hostile_handler:make", {{}}, namespace={namespace})
worker.ask({start!r}, 60.0)
threading.Thread(target=worker.ask, args=({body!r}, 3600.0), daemon=True).start()
open(os.environ["READY"]).close()
print("ready", flush=True)
{end}
"""


both_ways = pytest.mark.parametrize("namespace", [True, False])


@both_ways
def test_nothing_is_left_of_a_program_however_it_ends(
    namespace: bool, mark: str, tmp_path: Path
) -> None:
    for end, body in (
        ("os.kill(os.getpid(), 9)", "ready() or stuck()"),
        ("os.kill(os.getpid(), 9)", "ready() or hang()"),
        ("sys.exit(0)", "ready() or stuck()"),
        ("os._exit(1)", "ready() or hang()"),
        ("if os.fork(): os._exit(0)", "ready() or stuck()"),
    ):
        code = PROGRAM.format(namespace=namespace, start=EVERYTHING, body=body, end=end)
        done = run_program(code, tmp_path)
        assert (done.stdout, done.stderr) == ("ready\n", "")
        assert gone(mark), (end, body)


@both_ways
def test_nothing_is_left_where_a_supervisor_was_stopped_or_cannot_print(
    namespace: bool, mark: str, tmp_path: Path
) -> None:
    stop = "os.kill(os.getppid(), signal.SIGSTOP) or ready() or hang()"
    flood = "[print('x' * 1000, flush=True) or n or ready() for n in range(10**6)]"
    for body, terminal in ((stop, False), (flood, False), (flood, True)):
        code = PROGRAM.format(
            namespace=namespace, start=EVERYTHING, body=body, end="os.kill(os.getpid(), 9)"
        )
        with unread(terminal) as nobody:
            run_program(code, tmp_path, stderr=nobody)
            assert gone(mark), body


def test_printing_where_nobody_reads_is_no_fault(mark: str, tmp_path: Path) -> None:
    code = (
        "from sparrow.processes.worker import Worker\n"
        "worker = Worker('hostile_handler:make', {})\n"
        "for _ in range(30): print(worker.ask('print(1, flush=True)', 60))\n"
        "worker.close()"
    )
    with unread() as nobody:
        assert run_program(code, tmp_path, stderr=nobody).stdout == "None\n" * 30


def test_a_program_that_is_killed_as_it_starts_leaves_nothing(mark: str) -> None:
    """At once, and when its supervisor, and its worker, are there."""
    code = "from sparrow.processes.worker import Worker; import signal\n"
    code += "worker = Worker('hostile_handler:make', {}); worker.start()\n"
    code += "print('x', flush=True); signal.pause()"
    for others in (0, 1, 2):
        program = subprocess.Popen(
            [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        with program.stdout:
            program.stdout.readline()
        assert until(lambda least=others: len(marked(mark)) > least)
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert gone(mark), others


def test_memory(mark: str) -> None:
    for namespace in (True, False):
        worker = Worker("hostile_handler:make", {}, memory=512 * 2**20, namespace=namespace)
        assert worker.ask("len(hold(100_000_000))", PATIENT) == 100_000_000
        assert fault(worker, "hold(2_000_000_000)") == "raised"
        assert worker.ask("'fine'", PATIENT) == "fine"
        for before in ("", "import os; os.fork() and os._exit(0); "):  # each is within the limit
            assert fault(worker, f"children(3, 300_000_000, {before!r})") == "ended"
            assert worker.ask("'fine'", PATIENT) == "fine"
        worker.close()
        assert gone(mark)


def test_without_root(mark: str) -> None:
    """Users without privileges get a namespace too (in a user namespace), where it is allowed."""
    if os.geteuid() != 0:
        pytest.skip("the other tests are run without root")
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="readable-") as folder:
        os.chmod(folder, 0o755)
        shutil.copy(Path(sys.path[0]) / "hostile_handler.py", folder)
        own = {MARK: mark, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        python = next((one for one in PYTHONS if usable(one, own, nobody)), None)
        if python is None:
            pytest.skip("no Python and package that everybody may read")
        code = PROGRAM.format(
            namespace=True, start=EVERYTHING, body="ready() or stuck()", end="os._exit(0)"
        )
        given: dict[str, Any] = {"executable": python, "env": own, **nobody}
        done = run_program(code, Path(folder), **given)
        assert (done.stdout, done.stderr) == ("ready\n", "")
        assert gone(mark)
        message = run_program(CAPABILITIES, Path(folder), **given)
        assert message.stdout == "0\n", message.stderr


CAPABILITIES = """
from sparrow.processes.worker import Worker
question = "next(line.split()[1] for line in open('/proc/self/status') if 'CapEff' in line)"
worker = Worker("hostile_handler:make", {})
print(int(worker.ask(question, 60.0), 16))
worker.close()
"""
PYTHONS = (sys.executable, "/usr/bin/python3")


def usable(python: str, environment: dict[str, str], user: dict[str, Any]) -> bool:
    code = "import sys; import sparrow.processes.worker; sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, **user)
    except OSError:
        return False
    return done.returncode == 0
