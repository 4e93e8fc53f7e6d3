"""More memory, time, output or descriptors than a program may have.

Sources are bounded, so that they do no harm where a layer is off: taking about twice the limit is
enough to have got through.
"""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("resources")
add = KINDS.add
IGNORE = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
SLEEPY = {"endings": ("wall",), "limits": {"wall_seconds": 1.0}}
BUSY = {"endings": ("time",), "slow": True, "limits": {"wall_seconds": 12.0}}

# Memory.
add("memory by an array", "attempt(lambda: len(bytearray(600 << 20)))\n")
add(
    "memory by mmap and brk",
    """
import ctypes, mmap
def go():
    held = [mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(32)]
    return sum(map(len, held)) > 300 << 20
attempt(go)
def shared():
    held = [mmap.mmap(-1, 16 << 20) for _ in range(32)]
    return sum(map(len, held)) > 300 << 20
attempt(shared)
def brk():
    now = call("brk", 0)
    return call("brk", now + (512 << 20)) >= now + (512 << 20)
attempt(brk)
""",
)
add(
    "memory by children",
    """
import time
def go():
    for _ in range(3):
        if os.fork() == 0:
            held = bytearray(120 << 20)
            held[::4096] = b"x" * len(held[::4096])
            time.sleep(0.5)
            os._exit(0)
    return True
attempt(go)
""",
)
add(
    "memory in pipes",
    """
import fcntl
total = 0
def go():
    global total
    held = []
    while total < 300 << 20:
        reading, writing = os.pipe()
        held.append(reading)
        try:
            fcntl.fcntl(writing, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(writing, False)
        try:
            while True:
                total += os.write(writing, bytes(1 << 16))
        except BlockingIOError:
            pass
    return True
attempt(go)
attempt(lambda: total > 256 << 20)
""",
)
add(
    "memory in stacks of threads",
    """
import threading, time
threading.stack_size(64 << 20)
def go():
    for _ in range(16):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
    return True
attempt(go)
os._exit(0)
""",
)
add(
    "memory in page tables",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def go():
    for number in range(1, 20000):
        place = number << 30
        if libc.mmap(place, 4096, 3, 0x32, -1, 0) != place:
            return False
        ctypes.memset(place, 1, 1)
        if number * 8192 > 128 << 20:  # two tables for a page, on top of it
            return True
attempt(go)
""",
    limits={"memory_bytes": 128 << 20},
    finding="tables of pages are not in RLIMIT_AS: three times the limit's pages; only a cgroup counts them",
)
add(
    "memory in rules of landlock",
    """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
create, insert = NUMBERS["landlock_create_ruleset"], NUMBERS["landlock_add_rule"]
def go():
    total = 0
    while True:
        rules = libc.syscall(create, struct.pack("=QQ", 0, 3), ctypes.c_size_t(16), 0)
        if rules < 0:
            return False
        for port in range(65536):
            if libc.syscall(insert, rules, 2, struct.pack("=QQ", 3, port), 0) < 0:
                return False
        total += 65536
        if total * 64 > 64 << 20:
            return True
attempt(go)
""",
    limits={"memory_bytes": 64 << 20, "cpu_seconds": 6, "wall_seconds": 40.0},
    slow=True,
)
add(
    "memory in locks of files",
    """
import fcntl, struct, time
names = [os.path.join(os.path.dirname(os.__file__), name) for name in os.listdir(os.path.dirname(os.__file__)) if name.endswith(".py")]
def go():
    files = [os.open(name, os.O_RDONLY) for name in names[:50]]
    begun = time.process_time()
    for number in range(2_000_000):
        fcntl.fcntl(files[number % 50], fcntl.F_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 2 * (number // 50), 1, 0))
        if number * 200 > 256 << 20:
            return True
attempt(go)
""",
    endings=("exited", "time"),
    slow=True,
)
add(
    "memory in names that do not exist",
    """
import time
begun, place = time.process_time(), os.path.dirname(os.__file__) + "/" + "x" * 230
for number in range(30_000):
    os.path.exists(place + str(number))
""",
    endings=("exited", "time"),
)
add(
    "numbers, texts and lists without end",
    """
attempt(lambda: (1 << (1 << 33)) and True)
attempt(lambda: len("x" * (1 << 32)))
attempt(lambda: len([0] * (1 << 30)))
attempt(lambda: len("%1000000000d" % 1) and True)
attempt(lambda: len(bytes(1 << 40)))
def grow():
    x = [[]]
    while len(x) < 1 << 26:
        x += x
    return True
attempt(grow)
""",
    endings=("exited", "time"),
)
add(
    "a compressed bomb",
    """
import bz2, lzma, zlib
bomb = zlib.compress(bytes(64 << 20), 9)
attempt(lambda: len(b"".join(zlib.decompress(bomb) for _ in range(8))) > 300 << 20)
""",
    endings=("exited", "time"),
)

# Time.
add("cpu", "while True: pass\n", **BUSY)
add("cpu with all signals ignored", IGNORE + "while True: pass\n", **BUSY)
add(
    "cpu with a handler of the signal",
    """
import signal
signal.signal(signal.SIGXCPU, lambda *_: None)
while True:
    pass
""",
    **BUSY,
)
add(
    "cpu with signals blocked, in threads",
    """
import signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
def spin():
    while True: pass
for _ in range(4):
    threading.Thread(target=spin).start()
spin()
""",
    **BUSY,
)
add(
    "cpu with timers and a higher limit",
    """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
signal.signal(signal.SIGALRM, lambda *_: None)
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)
while True: pass
""",
    **BUSY,
)
add(
    "cpu in the kernel",
    """
fd = os.open("/dev/zero", os.O_RDONLY)
random = os.open("/dev/urandom", os.O_RDONLY)
held = bytearray(100 << 20)
while True:
    os.readv(fd, [held])
    os.readv(random, [held])
""",
    **BUSY,
)
add(
    "cpu in one operation of the interpreter",
    """
import signal
signal.signal(signal.SIGXCPU, lambda *_: None)
x = 3 ** 100_000_000
""",
    **BUSY,
)
add(
    "cpu in a regular expression",
    """
import re
re.match(r"(a|aa|a?a?)*" * 4 + "$", "a" * 60 + "b")
""",
    **BUSY,
)
add(
    "cpu between two ticks of the clock",
    """
import ctypes, signal, time
# RLIMIT_CPU counts by samples at ticks: who sleeps whenever the tick comes uses nothing.
ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
clock, tick = time.monotonic, 0.004
signal.setitimer(signal.ITIMER_PROF, 1000)
def sampled():
    return 1000 - signal.getitimer(signal.ITIMER_PROF)[0]
found = []
for _ in range(12):
    now = sampled()
    while sampled() == now:
        pass
    found.append(clock() % tick)
phase, begun = sorted(found)[6], time.process_time()
while time.process_time() - begun < 2.6:
    now = clock()
    following = now - (now - phase) % tick + tick
    while clock() < following - 0.0005:
        pass
    time.sleep(max(following + 0.0001 - clock(), 0))
""",
    limits={"wall_seconds": 30.0},
    endings=("time",),  # it runs on, and that is seen at its end
    slow=True,
)
add(
    "cpu up to the hard limit",
    """
import signal, time
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while time.process_time() < 1.6:
    pass
attempt(lambda: time.process_time() > 1.5)
os._exit(0)
""",
    endings=("time", "exited"),
    limits={"wall_seconds": 12.0},
    slow=True,
)
add("sleep", "import time; time.sleep(1000)\n", **SLEEPY)
ENDS = {**SLEEPY, "endings": ("wall", "exited")}  # the first process of a namespace ignores it
add("stopped by itself", "import signal; signal.raise_signal(signal.SIGSTOP)\n", **ENDS)
add(
    "waiting for nothing",
    """
import threading
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire).start()
lock.acquire()
""",
    **SLEEPY,
)
add(
    "streams closed, and on it goes",
    """
import time
os.closerange(0, 64)
time.sleep(1000)
""",
    **SLEEPY,
)
add(
    "streams closed, a thread goes on",
    """
import threading, time
def later():
    time.sleep(1000)
threading.Thread(target=later).start()
sys.stdin.close(); sys.stdout.close(); sys.stderr.close()
for number in (0, 1, 2):
    try:
        os.close(number)
    except OSError:
        pass
""",
    **SLEEPY,
)
add(
    "a slow end of the interpreter",
    """
import atexit, time
class Late:
    def __del__(self):
        time.sleep(1000)
keep = [Late()]
keep.append(keep)
atexit.register(time.sleep, 1000)
""",
    **SLEEPY,
)

# Output.
FLOOD = {"endings": ("output",)}
add("output to stdout", "while True: print('x' * 1000)\n", **FLOOD)
add("output to stderr", "while True: os.write(2, b'x' * 1000)\n", **FLOOD)
add(
    "output to both from threads",
    """
import threading
def flood(end):
    while True: os.write(end, b"x" * 5000 + b"\\n")
threading.Thread(target=flood, args=(1,)).start()
flood(2)
""",
    **FLOOD,
)
add("output without the end of a line", "while True: os.write(1, b'x' * 100000)\n", **FLOOD)
add("output of ends of lines", "while True: os.write(1, b'\\n' * 5000)\n", **FLOOD)
add(
    "output byte by byte",
    "while True: os.write(1, b'x')\n",
    **FLOOD | {"endings": ("output", "time")},
    slow=True,
)
add(
    "output of zeros and bytes that are no text",
    """
os.write(1, b"\\0" * 100 + b"\\xff\\xfe\\x80\\xc3\\n\\x1b[2J\\x1b]0;x\\x07\\r" + bytes(range(256)))
os.write(2, b"\\xed\\xa0\\x80\\0\\x9b31m")
sys.exit(3)
""",
)
add(
    "output after the end of the reader",
    """
import signal
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
os.dup2(1, 9)
os.close(1)
while True: os.write(9, b"x" * 100)
""",
    **FLOOD,
)

# The rest.
add(
    "descriptors",
    """
def go():
    held = []
    for _ in range(5000):
        held.append(os.dup(0))
    return True
attempt(go)
""",
)
add(
    "limits, raising them",
    """
import resource
for name in ("AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK"):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    attempt(lambda: resource.setrlimit(number, (-1, -1)) is None)
    attempt(lambda: hard != -1 and resource.setrlimit(number, (hard + 1, hard + 1)) is None)
""",
)
add(
    "deep recursion",
    """
sys.setrecursionlimit(10**9)
def go(x): return go(x + 1) + 1
go(0)
""",
    endings=("exited", "time"),
    limits={"wall_seconds": 12.0},
)
add(
    "deep structures",
    """
sys.setrecursionlimit(10**9)
x = []
for _ in range(3_000_000): x = [x]
try:
    repr(x)
except BaseException:
    pass
del x
""",
    endings=("exited", "time"),
)
add("input that is never read", "print(1)\n")
add("input read byte by byte", "while os.read(0, 1): pass\n", endings=("exited", "time"))
add("input closed at once", "os.close(0); import time; time.sleep(0.1)\n")
