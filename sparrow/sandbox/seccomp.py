"""A seccomp filter for Python programs: the calls that CPython needs, and no others.

There is no way to a socket, to another process, to a namespace or a device control among them.
What is not allowed fails with EPERM. By libseccomp, through pyseccomp.
"""

import functools
import tempfile
from importlib import import_module

from sparrow.sandbox.base import SandboxRefused

CLONE_THREAD = 0x10000
TERMINAL = 0x5401  # ioctl TCGETS: isatty
CLOSE_ON_EXEC = (0x5450, 0x5451)  # ioctl FIONCLEX, FIOCLEX
ALLOWED = """
    access arch_prctl brk capget chdir clock_getres clock_gettime clock_nanosleep close close_range
    copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
    epoll_wait eventfd2 execve exit exit_group faccessat faccessat2 fadvise64 fchdir fchmod fchmodat
    fcntl fdatasync fstat fstatfs fsync ftruncate futex futex_waitv get_robust_list getcpu
    getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid
    getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid gettimeofday
    getuid landlock_add_rule landlock_create_ruleset landlock_restrict_self link linkat lseek lstat
    madvise membarrier mincore mkdir mkdirat mmap mprotect mremap msync munmap nanosleep newfstatat
    open openat openat2 pause pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64 pselect6
    pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat renameat2
    restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getparam sched_getscheduler sched_yield select set_robust_list set_tid_address setitimer
    setrlimit sigaltstack stat statfs statx sysinfo tgkill time times truncate umask uname unlink
    unlinkat wait4 waitid write writev
""".split()  # noqa: SIM905

STARTING = {  # calls by which inside.py restricts itself
    "execve",
    "landlock_add_rule",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "prctl",
}


@functools.cache
def python_filter(*, final: bool = False) -> bytes:
    """The filter as BPF, for the machine that this runs on.

    final: without the calls that a sandbox needs to get started.
    """
    try:
        seccomp = import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxRefused(
            f"the filter of system calls needs pyseccomp and libseccomp ({error}): "
            "pip install 'sparrow-rl[code]', apt install libseccomp2"
        ) from error
    rules = seccomp.SyscallFilter(seccomp.ERRNO(1))
    for name in [name for name in ALLOWED if not (final and name in STARTING)]:
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) >= 0:  # others are of other machines
            rules.add_rule(seccomp.ALLOW, name)
    masked, equal = seccomp.MASKED_EQ, seccomp.EQ
    rules.add_rule(
        seccomp.ALLOW, "clone", seccomp.Arg(0, masked, CLONE_THREAD, CLONE_THREAD)
    )  # threads, no processes
    rules.add_rule(seccomp.ERRNO(38), "clone3")  # its flags are out of reach: libc then uses clone
    for request in (TERMINAL, *CLOSE_ON_EXEC):
        rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, equal, request))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
