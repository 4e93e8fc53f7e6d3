"""Namespaces, privileges, and calls that change the machine."""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("privileges")
add = KINDS.add

add(
    "unshare",
    """
for flags in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80, 0x10020000, 0x50020000):
    reach("unshare", flags)
""",
)
add(
    "setns",
    """
for name in ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup"):
    attempt(lambda: call("setns", os.open("/proc/%d/ns/%s" % (AIM["judge"], name), 0), 0) >= 0)
    attempt(lambda: call("setns", os.open("/proc/1/ns/" + name, 0), 0) >= 0)
""",
)
add(
    "mount",
    """
reach("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
reach("mount", b"none", b"/mnt", b"proc", 0, 0)
reach("mount", b"/", b"/tmp", 0, 0x1000, 0)
reach("mount", 0, b"/", 0, 32 | 0x1000, 0)
reach("fsopen", b"proc", 0)
reach("move_mount", -100, b"/usr", -100, b"/mnt", 0)
""",
)
add(
    "umount, pivot_root and chroot",
    """
reach("umount2", b"/dev/null", 2)
reach("umount2", b"/", 2)
reach("pivot_root", b"/", b"/tmp")
reach("chroot", b"/usr")
attempt(lambda: os.chroot("/tmp") is None)
""",
)
add(
    "users and groups",
    """
for user in (0, 1, 1000):
    for act in (os.setuid, os.seteuid, os.setgid, os.setegid):
        attempt(lambda: act(user) is None)
    attempt(lambda: os.setresuid(user, user, user) is None)
    attempt(lambda: os.setgroups([user]) is None)
attempt(lambda: os.getuid() == 0 or os.geteuid() == 0)
""",
)
add(
    "capabilities",
    """
import struct
reach("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6))
reach("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 1 << 21, 1 << 21, 1 << 21, 0, 0, 0))
attempt(lambda: call("prctl", 47, 2, 21, 0, 0) == 0)  # an ambient one
attempt(lambda: call("prctl", 28, 0x2F, 0, 0, 0) == 0)  # secure bits
""",
)
add(
    "keys",
    """
reach("keyctl", 0, -3, 0)
reach("keyctl", 1, 0, 0)
reach("add_key", b"user", b"sparrow", b"x", 1, -3)
reach("request_key", b"user", b"sparrow", 0, -3)
""",
)
add(
    "bpf, perf, userfaultfd",
    """
import struct
reach("bpf", 0, struct.pack("IIII", 1, 4, 4, 1) + bytes(112), 128)
reach("bpf", 5, bytes(128), 128)
reach("perf_event_open", struct.pack("IIQ", 1, 128, 0) + bytes(112), 0, -1, -1, 0)
reach("userfaultfd", 0)
reach("userfaultfd", 1)
""",
)
add(
    "personality",
    """
reach("personality", 0x0040000)
reach("personality", 0x0100000)
reach("personality", 0x0400000)
""",
)
add(
    "prctl",
    """
before = call("prctl", 21, 0, 0, 0, 0)
attempt(lambda: call("prctl", 38, 0, 0, 0, 0) == 0)  # new privileges again
attempt(lambda: call("prctl", 39, 0, 0, 0, 0) == 0)
attempt(lambda: before == 2 and call("prctl", 22, 0, 0, 0, 0) == 0)  # no filter
attempt(lambda: call("prctl", 35, 6, 0, 0, 0) == 0)  # PR_SET_MM
attempt(lambda: call("prctl", 24, 21, 0, 0, 0) == 0)  # a bounding capability
call("prctl", 8, 1, 0, 0, 0)  # keep capabilities: there are none
attempt(lambda: call("capset", bytes([0x22, 5, 8, 0x20, 0, 0, 0, 0]), bytes([255] * 24)) == 0)
call("prctl", 4, 1, 0, 0, 0)  # dumpable
call("prctl", 1, 0, 0, 0, 0)  # no signal when the parent dies
call("prctl", 15, b"bwrap\\x1b[2J", 0, 0, 0)
import time
attempt(lambda: os.open("/proc/self/mem", os.O_RDWR) >= 0)
attempt(lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, 0) == 0)
""",
)
add(
    "a filter of its own",
    """
import ctypes, struct
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))  # allow everything
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
try:
    call("prctl", 22, 2, program, 0, 0)
except OSError:
    pass
reach("socket", 2, 1, 0)
reach("seccomp", 1, 8, program)  # with a descriptor for notes
reach("unshare", 0x10000000)
""",
)
add(
    "calls with numbers of other machines",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for number in (NUMBERS["socket"], NUMBERS["unshare"], NUMBERS["memfd_create"]):
    for high in (0x40000000, 1 << 32, -1 << 63, 0x80000000):
        result = libc.syscall(ctypes.c_long(number | high), *map(ctypes.c_long, (2, 1, 0)))
        attempt(lambda: result >= 0)
""",
    endings=("exited",),
)
add(
    "terminal controls by wide numbers",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
number = 29 if os.uname().machine == "aarch64" else 16
for end in (0, 1, 2):
    for request in (0x5412, 0x541C, 0x540E, 0x5410, 0x5401 | 1 << 32, 0x5412 | 1 << 32, 0x5402):
        result = libc.syscall(ctypes.c_long(number), ctypes.c_long(end), ctypes.c_long(request), b"x" * 64)
        attempt(lambda: result >= 0)
""",
)
add(
    "machine state",
    """
import struct, time
reach("reboot", 0xFEE1DEAD, 672274793, 0, 0)
reach("sethostname", b"hostile", 7)
reach("setdomainname", b"hostile", 7)
now = struct.pack("QQ", int(time.time()), 0)
reach("settimeofday", now, 0)
reach("clock_settime", 0, now)
attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()) is None)
reach("swapon", b"/dev/vda", 0)
reach("acct", b"/tmp/x")
reach("init_module", bytes(8), 8, b"")
reach("finit_module", 0, b"", 0)
reach("kexec_load", 0, 0, 0, 0)
reach("vhangup")
reach("syslog", 3, bytes(100), 100)
""",
)
add(
    "ports and descriptor tables of x86",
    """
reach("iopl", 3)
reach("ioperm", 0, 8, 1)
import struct
reach("modify_ldt", 1, struct.pack("IIII", 0, 0, 0xFFFF, 0), 16)
reach("uselib", b"/usr/lib/x")
""",
)
add(
    "shared memory, queues and semaphores of others",
    """
reach("shmget", AIM["key"], 4096, 0o666)
""",
)
add(
    "new shared memory and queues",
    """
reach("shmget", 0, 64 << 20, 0o1666)
reach("msgget", 0, 0o1666)
reach("semget", 0, 1, 0o1666)
reach("mq_open", b"sparrow", 0o102, 0o666, 0)
""",
)
add(
    "timers, splices and descriptors of signals",
    """
reach("timerfd_create", 0, 0)
reach("signalfd4", -1, bytes(8), 8, 0)
reach("timer_create", 0, 0, bytes(8))
import struct, ctypes
buffer = ctypes.create_string_buffer(4096)
reading, writing = os.pipe()
reach("vmsplice", writing, struct.pack("QQ", ctypes.addressof(buffer), 4096), 1, 0)
reach("mlock", ctypes.addressof(buffer), 4096)
reach("lsm_list_modules", bytes(64), bytes(8), 0)
""",
)
add(
    "every other call, once",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
arm = os.uname().machine == "aarch64"
# Not called: those that are allowed, that end or stop the process, or make processes (see others).
skip = {SKIP}
for number in range(600):
    if number in skip:
        continue
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    if result >= 0 or ctypes.get_errno() not in (1, 38):
        os.write(2, ("call %d gives %d, %d\\n" % (number, result, ctypes.get_errno())).encode())
        won()
""",
)
