"""A kind of hostile program, and what is put before its source.

A source says `attempt(act)`: the marker is printed if act() gives something true, so only if the
attack got through; `reach(name, *words)` makes a raw system call that must not succeed, and
`call(name, *words)` one that may. AIM holds what there is to aim at (aims.py). The marker stands
backwards in the source, so that a traceback does not show it.
"""

# ruff: noqa: E501

import functools
import platform
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sparrow.sandbox.base import Ending, Limits, Mode
from sparrow.sandbox.seccomp import ALLOWED

MACHINE = platform.machine()
LIMITS = {"cpu_seconds": 1, "wall_seconds": 15.0, "memory_bytes": 256 << 20}
LIMITS |= {"output_bytes": 1 << 16, "threads": 32}

# Numbers of system calls: aarch64, x86_64 (None: that machine has no such call).
_NUMBERS = """
accept4 242 288|acct 89 163|add_key 217 248|adjtimex 171 159|bpf 280 321|brk 214 12|capset 91 126
chroot 51 161|clock_settime 112 227|clone 220 56|clone3 435 435|execveat 281 322
fallocate 47 285|fanotify_init 262 300|finit_module 273 313|fork - 57|fsopen 430 430
init_module 105 175|inotify_init1 26 294|io_uring_setup 425 425|ioperm - 173|iopl - 172
ioprio_set 30 251|kcmp 272 312|kexec_load 104 246|keyctl 219 250|kill 129 62
landlock_add_rule 445 445|landlock_create_ruleset 444 444|listmount 458 458|lsm_list_modules 461 461
memfd_create 279 319|memfd_secret 447 447|mknodat 33 259|mlock 228 149|mlockall 230 151
modify_ldt - 154|mount 40 165|mount_setattr 442 442|move_mount 429 429|mq_open 180 240
msgget 186 68|msgsnd 189 69|name_to_handle_at 264 303|open_by_handle_at 265 304|open_tree 428 428
perf_event_open 241 298|personality 92 135|pidfd_getfd 438 438|pidfd_open 434 434
pidfd_send_signal 424 424|pivot_root 41 155|pkey_alloc 289 330|prctl 167 157|process_madvise 440 440
process_vm_readv 270 310|process_vm_writev 271 311|ptrace 117 101|quotactl 60 179|reboot 142 169
request_key 218 249|rt_sigqueueinfo 138 129|rt_tgsigqueueinfo 240 297|sched_setaffinity 122 203
sched_setscheduler 119 144|seccomp 277 317|semget 190 64|setdomainname 162 171|setfsuid 151 122
setgid 144 106|setgroups 159 116|sethostname 161 170|setns 268 308|setpriority 140 141
setregid 143 114|setresuid 147 117|setsid 157 112|settimeofday 170 164|setuid 146 105
setxattr 5 188|shmat 196 30|shmget 194 29|signalfd4 74 289|socket 198 41|socketpair 199 53
splice 76 275|statmount 457 457|swapon 224 167|symlinkat 36 266|syslog 116 103|tee 77 276
tgkill 131 234|timer_create 107 222|timerfd_create 85 283|tkill 130 200|umount2 39 166
unshare 97 272|uselib - 134|userfaultfd 282 323|vfork - 58|vhangup 58 153|vmsplice 75 278
"""


def _numbers() -> dict[str, int]:
    column = 2 if MACHINE == "x86_64" else 1
    rows = [row.split() for row in re.split(r"[|\n]", _NUMBERS) if row.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


NUMBERS = _numbers()

PRELUDE = """
import os, sys
def won(*_):
    for end in (1, 2):
        try:
            os.write(end, (AIM["marker"][::-1] + "\\n").encode())
        except OSError:
            pass
def attempt(act):
    try:
        if act():
            won()
            return True
    except BaseException as error:
        try:
            os.write(2, (type(error).__name__ + " " + str(error)[:100] + "\\n").encode("ascii", "replace"))
        except BaseException:
            pass
    return False
def call(name, *words):
    import ctypes
    if name not in NUMBERS:
        raise OSError(38, "no such call on this machine")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def reach(name, *words):
    return attempt(lambda: call(name, *words) >= 0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of attack.

    endings: those that are right: with another one it got through
    limits: other than LIMITS
    reckless: without namespaces it would hit other processes of the same user
    slow: seconds rather than tenths
    finding: why it gets through today; empty: it does not
    """

    name: str
    category: str
    source: str
    mode: Mode = "script"
    endings: tuple[Ending, ...] = ("exited",)
    limits: dict[str, Any] = field(default_factory=dict)
    reckless: bool = False
    slow: bool = False
    finding: str = ""

    def limit(self) -> Limits:
        return Limits(**LIMITS | self.limits)


@functools.cache
def skipped() -> set[int]:
    """Numbers of calls that are not made to see whether they can be: see privileges.py."""
    try:
        pyseccomp: Any = import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError):
        return set(range(600))
    names = {*ALLOWED, "ioctl", "clone", "clone3", "fork", "vfork", "ptrace", "seccomp", "exit"}
    names |= {"exit_group", "rt_sigreturn", "vhangup", "kill", "tkill"}
    return {pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in names}


def complete(body: str, aim: dict[str, Any], *, every: bool = False) -> str:
    """A program: the body with everything that it needs before it.

    every: the numbers of all calls, where the body does not show which it makes.
    """
    body = body.replace("{SKIP}", repr(skipped()))
    every |= "NUMBERS" in body
    numbers = {name: NUMBERS[name] for name in NUMBERS if every or name in body}
    return f"AIM = {aim!r}\nNUMBERS = {numbers!r}\n{PRELUDE}{body}"


class Kinds(list[Kind]):
    """Kinds of one category, with what they have in common."""

    def __init__(self, category: str, **common: Any) -> None:
        super().__init__()
        self._common = {"category": category, **common}

    def add(self, name: str, source: str, **settings: Any) -> None:
        self.append(Kind(**self._common | {"name": name, "source": source} | settings))
