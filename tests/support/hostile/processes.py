"""Other processes: making them, and reaching those that are there."""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("processes")
add = KINDS.add

add(
    "fork",
    """
import time
def go():
    for count in range(100):
        if os.fork() == 0:
            time.sleep(1); os._exit(0)
        if count > 48:
            return True
attempt(go)
""",
)
add(
    "one child",
    """
def go():
    if (pid := os.fork()) == 0:
        os._exit(0)
    return os.waitpid(pid, 0)
attempt(go)
""",
)
add(
    "forks that fork",
    """
import time
def go(depth):
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            if depth:
                go(depth - 1)
            won(); time.sleep(1); os._exit(0)
attempt(lambda: go(3))
""",
)
add(
    "fork and clone by raw calls",
    """
import signal
for name, words in (("clone", (17, 0, 0, 0, 0)), ("fork", ())):
    def go():
        pid = call(name, *words)
        if pid == 0:
            os._exit(0)
        return pid > 0
    attempt(go)
""",
)
add(
    "clone3",
    """
import struct
def go():
    pid = call("clone3", struct.pack("8Q", 0, 0, 0, 0, 17, 0, 0, 0), 64)
    if pid == 0:
        os._exit(0)
    return pid > 0
attempt(go)
""",
)
add(
    "clone with flags of threads and of namespaces",
    """
for flags in (0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x00020000):
    def go():
        pid = call("clone", flags | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        return pid > 0
    attempt(go)
    reach("clone", flags | 0x10000, 0, 0, 0, 0)  # a thread must share its memory: refused
""",
)
add(
    "subprocess, system, popen and posix_spawn",
    """
import subprocess
python = os.path.realpath(sys.executable)
attempt(lambda: subprocess.run([python, "-S", "-c", "pass"]).returncode == 0)
attempt(lambda: os.system("/bin/true") == 0)
attempt(lambda: os.popen("/bin/echo x").read())
attempt(lambda: os.posix_spawn(python, [python, "-S", "-c", "pass"], {}))
attempt(lambda: os.spawnv(os.P_WAIT, python, [python, "-S", "-c", "pass"]) == 0)
attempt(lambda: os.forkpty()[0])
""",
)
add(
    "multiprocessing",
    """
import multiprocessing
for method in ("fork", "spawn", "forkserver"):
    def go():
        child = multiprocessing.get_context(method).Process(target=won)
        child.start()
        child.join(2)
        return child.exitcode == 0
    attempt(go)
""",
    limits={"wall_seconds": 8.0},
    endings=("exited", "wall", "time"),
)
add(
    "a new interpreter without limits",
    """
code = '''
import os, resource
for name in ("CPU", "AS", "NPROC", "NOFILE", "FSIZE"):
    number = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(number)
    if hard == resource.RLIM_INFINITY:
        os.write(1, (MARKER[::-1] + chr(10)).encode())
    try:
        resource.setrlimit(number, (-1, -1)); os.write(1, (MARKER[::-1] + chr(10)).encode())
    except (OSError, ValueError):
        pass
try:
    if os.fork() == 0: os._exit(0)
    os.write(1, (MARKER[::-1] + chr(10)).encode())
except OSError:
    pass
'''.replace("MARKER", repr(AIM["marker"]))
os.execv(os.path.realpath(sys.executable), ["python3", "-S", "-c", code])
""",
)
add(
    "programs of the host",
    """
for path in ("/bin/sh", "/usr/bin/env", "/bin/busybox", "/usr/bin/bwrap", "/usr/bin/sudo", "/bin/su", "/usr/bin/mount", "/sbin/init"):
    if os.path.exists(path):
        attempt(lambda: os.access(path, os.X_OK))
    attempt(lambda: open(path, "rb").read(4))
""",
)
add(
    "the loader as a program",
    """
import glob
for loader in ("/lib/ld-linux-aarch64.so.1", "/lib64/ld-linux-x86-64.so.2"):
    if os.path.exists(loader):
        os.execv(loader, [loader, os.path.realpath(sys.executable), "-S", "-c", "import os; os.fork(); os.write(1, (%r[::-1] + chr(10)).encode())" % AIM["marker"]])
""",
)
add(
    "a bomb of threads",
    """
import threading, time
def go():
    for count in range(400):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        if count > 64:
            return True
threading.stack_size(256 << 10)
attempt(go)
os._exit(0)
""",
)
add(
    "daemon by a double fork",
    """
import time
def go():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(4)
            os._exit(0)
        os._exit(0)
    return True
attempt(go)
""",
)
add(
    "a session of its own",
    """
reach("setsid")
""",
)
add(
    "signals to processes outside",
    """
import signal
for pid in (AIM["victim"], AIM["judge"], -AIM["victim"]):
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        if pid == AIM["judge"] and number:
            continue
        attempt(lambda: os.kill(pid, number) is None)
    reach("tgkill", pid, pid, 0)
    reach("tkill", pid, 0)
""",
)
add(
    "signals to all",
    """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
attempt(lambda: os.kill(-1, signal.SIGTERM) is not None)
attempt(lambda: os.kill(-1, signal.SIGKILL) is not None)
""",
    reckless=True,
    endings=("exited", "time"),
)
add(
    "signals to the parent",
    """
import signal
for pid in {os.getppid(), 1}:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV, signal.SIGXCPU):
        try:
            call("tgkill", pid, pid, int(number))
        except OSError:
            pass
        try:
            os.kill(pid, number)
        except OSError:
            pass
import time
time.sleep(0.1)
print("done")
""",
    reckless=True,
    endings=("exited", "time"),
)
add(
    "queued signals that lie about their sender",
    """
import struct
for pid in (AIM["victim"], os.getppid(), 1):
    reach("rt_sigqueueinfo", pid, 10, struct.pack("iii", 10, 0, -1) + bytes(116))
    reach("rt_tgsigqueueinfo", pid, pid, 10, struct.pack("iii", 10, 0, -1) + bytes(116))
""",
    reckless=True,
)
add(
    "signals by descriptors",
    """
import fcntl, signal
def go():
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, AIM["victim"])
    fcntl.fcntl(reading, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writing, b"x")
attempt(go)
""",
)
add(
    "ptrace",
    """
for pid in (AIM["victim"], os.getppid(), 1, AIM["judge"]):
    for request in (16, 0x4206):
        if pid != AIM["judge"] or request == 0x4206:
            reach("ptrace", request, pid, 0, 0)
""",
    reckless=True,
)
add(
    "memory of other processes",
    """
import ctypes, struct
own = ctypes.create_string_buffer(64)
local = struct.pack("QQ", ctypes.addressof(own), 64)
for pid in (AIM["victim"], os.getppid(), 1, AIM["judge"]):
    for base in (0x400000, 0x10000, 0xAAAAAAAA0000, 0x555555554000):
        reach("process_vm_readv", pid, local, 1, struct.pack("QQ", base, 64), 1, 0)
        reach("process_vm_writev", pid, local, 1, struct.pack("QQ", base, 64), 1, 0)
reach("kcmp", os.getpid(), 1, 0, 0, 0)
reach("process_madvise", 3, local, 1, 4, 0)
""",
)
add(
    "descriptors of processes",
    """
for pid in (AIM["victim"], os.getppid(), 1, AIM["judge"]):
    def go():
        fd = call("pidfd_open", pid, 0)
        try:
            return call("pidfd_getfd", fd, 0, 0) >= 0
        except OSError:
            return call("pidfd_send_signal", fd, 0, 0, 0) >= 0
    attempt(go)
""",
)
add(
    "priorities and processors",
    """
attempt(lambda: os.sched_setaffinity(0, {0}) is None)
attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19) is None)
attempt(lambda: os.nice(-5) < 0)
attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) is None)
reach("ioprio_set", 3, 0, 0)
""",
    reckless=True,
)
add(
    "limits of other processes",
    """
import resource
for pid in (AIM["victim"], AIM["judge"]):
    attempt(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE) and True)
attempt(lambda: resource.prlimit(0, resource.RLIMIT_AS, (-1, -1)) is None)
""",
    limits={},
)
