"""Attacks on the interpreter, the harness around the program, and the messages to the judge."""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("interpreter")
add = KINDS.add
CALLS = {
    "mode": "calls",
    "limits": {"wall_seconds": 2.0},
    "endings": ("exited", "wall", "time", "output"),
}
SAY = """
import json
def say(message, end=b"\\n"):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    for number in range(3, 9):
        try:
            os.write(number, data + end)
        except OSError:
            pass
def solve(*args):
    return 0
"""

add(
    "writes to memory anywhere",
    """
import ctypes, random
numbers = random.Random(1)
for _ in range(2000):
    ctypes.memset(id(object) + numbers.randrange(-(1 << 16), 1 << 16), 0xFF, 1)
""",
    endings=("exited", "time"),
)
add("segmentation fault", "import ctypes; ctypes.string_at(0)\n")
add("abort", "os.abort()\n")
add(
    "stack overflow in C",
    "f = lambda: 0\nfor _ in range(1000000): f = type('x', (), {'__call__': f})()\nf()\n",
    endings=("exited", "time"),
)
add(
    "bad code object",
    "f = lambda: 0\nf.__code__ = f.__code__.replace(co_code=bytes(range(256)) * 4)\nf()\n",
    endings=("exited", "time"),
)
add(
    "signals to itself",
    "import signal\nfor n in range(1, 65):\n    if n not in (9, 19, 20, 21, 22):\n        try: signal.signal(n, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n        try: signal.raise_signal(n)\n        except OSError: pass\nsignal.raise_signal(9)\n",
    endings=("exited", "time"),
)
add(
    "frames and garbage for secrets",
    """
import gc, inspect
def texts():
    frame = sys._getframe()
    while frame:
        yield from (repr(value)[:10000] for value in list(frame.f_locals.values()) + list(frame.f_globals.values()) if not callable(value))
        frame = frame.f_back
    for thing in gc.get_objects()[:50000]:
        if isinstance(thing, (dict, list, tuple)):
            yield repr(thing)[:3000] if len(thing) < 50 else ""
    yield repr(sys.orig_argv) + repr(sys.argv) + repr(dict(os.environ)) + repr(sys.path)
del AIM["secret"]
attempt(lambda: any("YRANAC_WORRAPS" in text[::-1] for text in texts()))
words = [word for word in sys.orig_argv if "orig_argv" not in word]  # not this source
attempt(lambda: "/root" in repr(words) or "/work" in repr(words))
attempt(lambda: any("nonce" in word and "mode" not in word for word in words))
""",
)
add(
    "the harness replaced",
    """
import builtins, json
main = sys.modules["__main__"]
for name in list(vars(main)):
    if not name.startswith("__"):
        setattr(main, name, None)
frame = sys._getframe()
while frame:
    frame.f_globals.update({"limit": won, "pack": lambda value: value, "json": None})
    frame = frame.f_back
builtins.print = builtins.open = builtins.compile = lambda *a, **k: None
json.dumps = json.loads = lambda *a, **k: "{}"
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
sys.excepthook = lambda *a: os._exit(0)
sys.addaudithook(lambda *a: None)
raise ValueError
""",
)
add(
    "the streams replaced",
    """
import io
sys.stdout = io.StringIO()
sys.stderr = open(os.dup(1), "w")
os.dup2(0, 1)
os.dup2(2, 0)
try:
    os.write(1, b"x")
except OSError:
    pass
sys.__stdout__ = None
""",
)
add(
    "no end of the process",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nos.fork = None\nsys.exit(0)\n",
    endings=("wall",),
    limits={"wall_seconds": 1.0},
)
add("exit at once", "os._exit(0)\n")
add(
    "exit with a code of a signal",
    "os._exit(137)\n",
    endings=("exited",),
    finding="137 as an exit code reads as out of CPU time",
)
add(
    "escape sequences for a terminal",
    "sys.stderr.write('\\x1b]2;x\\x07\\x1b[2J\\x1b[31m\\x9b6n'); sys.exit(1)\n",
)
add("source of odd characters", "x = '\\u202e\\ufeff\\x00\\U0010ffff'\nexec('\\ufeff' + 'pass')\n")
add("source with a zero byte", "x = 1\x00\nwon()\n")
add("source that is too deep", "(" * 3000 + ")" * 3000 + "\n")
add(
    "source that is too deep for the compiler",
    "x = " + "-" * 200000 + "1\n",
    endings=("exited", "time"),
)
add("source of 5 MB", "x = 1\n" * 800_000, endings=("exited", "time"))
add("source of one long line", "x = '" + "a" * 5_000_000 + "'\n")
add("modules that are not there", "import numpy\n")
add(
    "modules replaced",
    """
import types
class Everything(dict):
    def __missing__(self, key): return types.ModuleType(key)
sys.modules.clear()
sys.meta_path.clear()
sys.path_hooks.clear()
""",
)

# Messages by hand.
add("calls: no answer", "import time\ntime.sleep(1000)\n", **CALLS)
add("calls: end before ready", "os._exit(0)\n", **CALLS)
add("calls: raises at import", "raise SystemExit(0)\n", **CALLS)
add(
    "calls: answers before they are asked for",
    SAY + 'for _ in range(1000):\n    say({"value": True, "args": []})\n',
    **CALLS,
)
add("calls: half a line", SAY + 'say(b"{", b"")\nimport time\ntime.sleep(1000)\n', **CALLS)
add("calls: not text", SAY + 'say(b"\\xff\\xfe\\0\\x80")\n', **CALLS)
add("calls: no JSON", SAY + 'say(b"}{")\n', **CALLS)
add(
    "calls: other JSON",
    SAY
    + 'for text in (b"1", b"null", b"[]", b"{}", b\'"x"\', b"NaN", b\'{"value": {"what": 1}, "args": 3}\'):\n    say(text)\n',
    **CALLS,
)
add(
    "calls: deep JSON",
    SAY + 'say({"ready": True})\nsay(b\'{"value": \' + b"[" * 30000 + b"]" * 30000 + b"}")\n',
    **CALLS,
)
add(
    "calls: deep value",
    SAY
    + 'say({"ready": True})\nsay(b\'{"value": \' + b"[" * 600 + b"]" * 600 + b\', "args": []}\')\n',
    **CALLS,
)
add(
    "calls: a complex number that is too large",
    SAY + 'say({"ready": True})\nsay({"value": {"complex": [10**400, 0]}, "args": []})\n',
    **CALLS,
)
add(
    "calls: a key that is no key",
    SAY + 'say({"ready": True})\nsay({"value": {"dict": [[[1], 2]]}, "args": []})\n',
    **CALLS,
)
add(
    "calls: a number of many digits",
    SAY + 'say({"ready": True})\nsay(b\'{"value": \' + b"9" * 60000 + b\', "args": []}\')\n',
    **CALLS,
)
add(
    "calls: numbers with one hash",
    SAY
    + 'say({"ready": True})\nsay({"value": {"set": [1 + i * ((1 << 61) - 1) for i in range(2500)]}, "args": []})\n',
    **CALLS,
)
add("calls: a flood of answers", SAY + 'while True:\n    say({"value": 1, "args": []})\n', **CALLS)
add(
    "calls: a value that is packed without end",
    """
class Endless(dict):
    def items(self):
        while True: yield 1, 1
def solve(*args): return Endless()
""",
    **CALLS,
)
add(
    "calls: a value that lies",
    """
class Any:
    __class__ = property(lambda self: bool)
    def __eq__(self, other): return True
    def __iter__(self): return iter([self])
    def __str__(self): return "x" * (1 << 28)
def solve(*args): return Any()
""",
    **CALLS,
)
add(
    "calls: an error whose text has no end",
    """
class Error(Exception):
    def __str__(self):
        while True: pass
def solve(*args): raise Error
""",
    **CALLS,
)
add(
    "calls: the channel taken",
    """
for number in range(3, 9):
    try:
        os.dup2(2, number)
    except OSError:
        pass
def solve(*args): return 1
""",
    **CALLS,
)
add(
    "calls: the channel read by another thread",
    """
import threading
def drain(number):
    while True:
        try:
            if not os.read(number, 100): return
        except OSError:
            return
for number in range(3, 6):
    threading.Thread(target=drain, args=(number,)).start()
def solve(*args): return 1
""",
    **CALLS,
)
add(
    "calls: the loop replaced",
    """
main = sys.modules["__main__"]
main._answer = lambda *_: {"value": True, "args": [], "test": 0, "nonce": "", "reason": ""}
main._say(open(4, "w", closefd=False), {"test": 0, "nonce": "0" * 32, "reason": ""})
""",
    **CALLS,
)
