"""Ways to files that are none of the program's business, and more of them than it may have."""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("files")
add = KINDS.add

add(
    "reading /etc",
    """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/hosts", "/etc/ssl/openssl.cnf", "/etc/machine-id"):
    attempt(lambda: open(path).read())
""",
)
add(
    "the canary file, by many names",
    """
path = AIM["folder"] + "/secret"
names = [path, "/" + path, "/mnt/../" + path, "/usr/lib/../../" + path, "../" * 40 + path[1:], "/proc/self/root" + path,
         "/proc/1/root" + path, "/proc/self/cwd" + path, "//tmp/./" + path[5:], "/dev/fd/../../../.." + path,
         "/proc/%d/root%s" % (AIM["judge"], path), "/proc/%d/cwd%s" % (AIM["victim"], path)]
for name in names:
    attempt(lambda: AIM["secret"] in open(name).read())
    attempt(lambda: AIM["secret"].encode() in os.read(os.open(name.encode(), os.O_RDONLY), 100))
    attempt(lambda: os.open(name, os.O_WRONLY | os.O_TRUNC) >= 0)
""",
)
add(
    "a new file outside",
    """
for place in (AIM["folder"], AIM["other"], "/var/tmp", "/run", "/dev/shm", "/", "/mnt", "/dev", "/usr/lib", "/home"):
    name = place + "/sparrow-attack-" + AIM["secret"][:6]
    attempt(lambda: open(name, "w").write("x"))
    attempt(lambda: os.mkdir(name + "d") is None)
    attempt(lambda: os.mkfifo(name + "f") is None)
""",
)
add(
    "/tmp without scratch",
    """
attempt(lambda: open("/tmp/sparrow-attack", "w").write("x"))
attempt(lambda: open("sparrow-attack", "w").write("x"))
attempt(lambda: os.mkdir("/tmp/sparrow-attack-d") is None)
import tempfile
attempt(lambda: tempfile.TemporaryFile())
""",
)
add(
    "environments of processes",
    """
secret = AIM["secret"]
attempt(lambda: secret in str(dict(os.environ)))
def look(pid):
    return secret in open("/proc/%s/environ" % pid, errors="replace").read()
for pid in ("self", "thread-self", *range(1, 300), AIM["judge"], AIM["victim"], os.getppid()):
    try:
        found = look(pid)
    except OSError:
        continue
    attempt(lambda: found)
""",
)
add(
    "environment in this process's memory",
    """
import ctypes
libc = ctypes.CDLL(None)
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
found, index = b"", 0
while environ[index]:
    found += environ[index]
    index += 1
attempt(lambda: AIM["secret"].encode() in found)
block = ctypes.cast(environ[0] and ctypes.cast(environ, ctypes.POINTER(ctypes.c_void_p))[0], ctypes.c_void_p).value
attempt(lambda: AIM["secret"].encode() in ctypes.string_at(block, 64))
""",
)
add(
    "memory and descriptors by /proc",
    """
for pid in (1, "self", os.getppid(), AIM["judge"], AIM["victim"]):
    for name in ("mem", "maps", "fd/0", "cmdline", "stack", "auxv", "task", "ns/net", "map_files", "cgroup", "mountinfo", "status"):
        attempt(lambda: os.open("/proc/%s/%s" % (pid, name), os.O_RDONLY) >= 0)
    attempt(lambda: os.open("/proc/%s/mem" % pid, os.O_RDWR) >= 0)
    attempt(lambda: open("/proc/%s/oom_score_adj" % pid, "w").write("-1000"))
""",
)
add(
    "/proc and /sys of the kernel",
    """
for name in ("/proc/kallsyms", "/proc/cpuinfo", "/proc/mounts", "/proc/net/tcp", "/proc/sys/kernel/core_pattern", "/proc/keys",
             "/proc/kcore", "/proc/config.gz", "/sys/kernel/notes", "/sys/class/net", "/sys/fs/cgroup", "/sys/kernel/debug"):
    attempt(lambda: os.open(name, os.O_RDONLY) >= 0)
for name in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state", "/proc/sys/vm/drop_caches"):
    attempt(lambda: os.open(name, os.O_WRONLY) >= 0)
attempt(lambda: open("/sys/fs/cgroup/pids/tasks", "w"))
""",
)
add(
    "devices",
    """
for name in ("tty", "ptmx", "pts/0", "console", "mem", "kmem", "port", "kvm", "fuse", "vda", "sda", "nvme0", "loop-control",
             "kmsg", "full", "random", "userfaultfd", "vsock", "net/tun", "shm/x", "mqueue", "hwrng", "nvidia0", "nvidiactl",
             "uinput", "input/event0", "rtc0", "watchdog", "cpu_dma_latency", "snapshot", "uhid", "vhost-net", "dri/card0"):
    for flags in (os.O_RDONLY, os.O_RDWR):
        attempt(lambda: os.open("/dev/" + name, flags | os.O_NONBLOCK | os.O_NOCTTY) >= 0)
""",
)
add(
    "controls of the devices there are",
    """
import fcntl
for name in ("/dev/null", "/dev/zero", "/dev/urandom"):
    fd = os.open(name, os.O_RDWR if name == "/dev/null" else os.O_RDONLY)
    for request in (0x5206, 0x5203, 0x5201, 0x40085203, 0x5452, 0x541B, 0x5421, 0x4004667E, 0x5413):
        attempt(lambda: fcntl.ioctl(fd, request, bytes(64)) is None)  # RNDCLEARPOOL, FIONREAD, FIONBIO ...
    for path in (name,):
        attempt(lambda: os.chmod(path, 0o777) is None)
        attempt(lambda: os.chown(path, os.getuid(), -1) is None and os.stat(path).st_uid == os.getuid())
        attempt(lambda: os.rename(path, "/dev/other") is None)
        attempt(lambda: os.unlink(path) is None)
attempt(lambda: fcntl.ioctl(os.open("/dev/urandom", 0), 0x5200, bytes(4)) is not None)
""",
)
add(
    "touching a device of the host",
    """
before = os.stat("/dev/null").st_mtime_ns
attempt(lambda: os.utime("/dev/null") is None and os.stat("/dev/null").st_mtime_ns != before)
""",
)
add(
    "locks on files of the host",
    """
import fcntl
attempt(lambda: fcntl.flock(os.open("/dev/null", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB) is None)
attempt(lambda: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB) is None)
""",
)
add(
    "leases and notes on files of the host",
    """
import fcntl
attempt(lambda: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, fcntl.F_RDLCK) == 0 and os.getuid() != os.stat(os.__file__).st_uid)
attempt(lambda: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLK, __import__("struct").pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)))
""",
)
add(
    "making devices",
    """
for mode, numbers in ((0o60666, (254, 0)), (0o20666, (1, 1)), (0o20666, (1, 3))):
    for place in ("/tmp", "/dev", "/mnt", AIM["other"]):
        attempt(lambda: os.mknod(place + "/device", mode, os.makedev(*numbers)) is None)
""",
    limits={"scratch_bytes": 1 << 20},
)
add(
    "symbolic links out of the scratch folder",
    """
link = "/tmp/link"
attempt(lambda: os.symlink(AIM["folder"], link) is None and AIM["secret"] in open(link + "/secret").read())
attempt(lambda: os.symlink("/proc/1/root", link + "2") is None and os.listdir(link + "2"))
""",
    limits={"scratch_bytes": 1 << 20},
)
add(
    "hard links to files outside",
    """
for source in (AIM["folder"] + "/secret", AIM["other"] + "/file", "/usr/bin/python3", "/dev/null", "/mnt/program.py"):
    for flags in (True, False):
        attempt(lambda: os.link(source, "/tmp/own", follow_symlinks=flags) is None)
    attempt(lambda: os.link(source, AIM["other"] + "/own") is None)
    attempt(lambda: os.rename(source, AIM["other"] + "/own") is None)
""",
)
add(
    "changing the harness or the interpreter",
    """
for path in ("/mnt/inside.py", "/mnt/program.py", os.__file__, os.path.realpath(sys.executable)):
    attempt(lambda: os.open(path, os.O_WRONLY) >= 0)
    attempt(lambda: os.chmod(path, 0o777) is None)
    attempt(lambda: os.truncate(path, 0) is None)
    attempt(lambda: os.rename(path, path + "2") is None)
    attempt(lambda: os.unlink(path) is None)
""",
)
add(
    "modes and owners outside",
    """
for path in (AIM["other"] + "/file", AIM["folder"] + "/secret", AIM["folder"]):
    attempt(lambda: os.chmod(path, 0o4777) is None)
    attempt(lambda: os.utime(path, (1, 1)) is None)
    attempt(lambda: os.utime(path) is None)
    attempt(lambda: os.setxattr(path, "user.x", b"x") is None)
""",
)
add(
    "setuid bits in the scratch folder",
    """
import shutil
def go():
    shutil.copy(os.path.realpath(sys.executable), "/tmp/own")
    os.chmod("/tmp/own", 0o6777)
    os.execv("/tmp/own", ["own", "-S", "-c", "import os; os.write(1, (%r[::-1] + chr(10)).encode())" % AIM["marker"]])
attempt(go)
""",
    limits={"scratch_bytes": 16 << 20},
)
add(
    "file handles",
    """
import ctypes, struct
attempt(lambda: call("open_by_handle_at", os.open("/", os.O_RDONLY | os.O_PATH), struct.pack("IiQ", 8, 1, 2), 0) >= 0)
def go():
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128), 200)
    call("name_to_handle_at", -100, b"/usr/lib", handle, ctypes.create_string_buffer(8), 0)
    for inode in (2, 12, 100):
        handle[8:12] = struct.pack("I", inode)
        fd = call("open_by_handle_at", os.open("/usr/lib", os.O_RDONLY), handle, 0)
        return fd >= 0
attempt(go)
""",
)
add(
    "nameless files",
    """
for place in ("/", "/tmp", "/dev", "/mnt", "/dev/shm", "/var/tmp", AIM["other"]):
    attempt(lambda: os.open(place, os.O_TMPFILE | os.O_RDWR, 0o600) >= 0)
""",
)
add(
    "memfd",
    """
attempt(lambda: os.memfd_create("x") >= 0)
reach("memfd_secret", 0)
""",
)
add(
    "program from memory",
    """
import shutil
def go():
    fd = os.memfd_create("x", 0)
    code = "import os; os.write(1, (%r[::-1] + chr(10)).encode())" % AIM["marker"]
    os.write(fd, b"#!" + os.path.realpath(sys.executable).encode() + b" -S\\n" + code.encode())
    os.execve(fd, ["x"], {})
attempt(go)
""",
)
add(
    "large file in the scratch folder",
    """
def go():
    total = 0
    for number in range(8):
        with open("/tmp/%d" % number, "wb", 0) as file:
            for _ in range(16):
                total += file.write(bytes(1 << 20))
                if total > 3 << 20:
                    return True
attempt(go)
attempt(lambda: os.truncate("/tmp/0", 1 << 40) is None)
attempt(lambda: os.posix_fallocate(os.open("/tmp/0", os.O_RDWR), 0, 1 << 30) is None)
""",
    limits={"scratch_bytes": 1 << 20},
    endings=("exited", "time"),
)
add(
    "inodes in the scratch folder",
    """
import time
made, pad = 0, "x" * 200
def go():
    global made
    while made < 150_000:
        if made % 1000 == 0:
            os.mkdir("/tmp/%d" % made)
            os.chdir("/tmp/%d" % made)
        os.close(os.open(pad + str(made), os.O_CREAT | os.O_WRONLY))
        made += 1
        if made * 1000 > 128 << 20:  # bytes of the kernel for one: 1250 measured
            return True
attempt(go)
""",
    limits={
        "scratch_bytes": 1 << 20,
        "memory_bytes": 64 << 20,
        "cpu_seconds": 6,
        "wall_seconds": 40.0,
    },
    finding="a tmpfs has no limit of inodes: 1.3 GB of the kernel's memory in 9 s of CPU",
    endings=("exited", "time"),
    slow=True,
)
add(
    "deep folders and long names",
    """
def go():
    for number in range(3000):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
os.chdir("/tmp")
attempt(go)
attempt(lambda: open("/" + "a/" * 100000) and True)
attempt(lambda: open("a" * 300) and True)
attempt(lambda: open("/usr/lib/\\0/etc/passwd") and True)
""",
    limits={"scratch_bytes": 1 << 20},
    endings=("exited", "time"),
)
add(
    "mounted file systems by new calls",
    """
reach("open_tree", -100, b"/", 1)
reach("fsopen", b"tmpfs", 0)
reach("statmount", bytes(32), bytes(512), 512, 0)
reach("listmount", bytes(32), bytes(512), 64, 0)
reach("mount_setattr", -100, b"/", 0, bytes(32), 32)
reach("fanotify_init", 0x200, 0)
reach("inotify_init1", 0)
reach("quotactl", 0x80000100, 0, 0, 0)
""",
)
add(
    "old directories and chroot by descriptors",
    """
import stat
for number in range(3, 64):
    attempt(lambda: os.fchdir(number) is None and AIM["secret"] in open("./" + AIM["folder"] + "/secret").read())
    attempt(lambda: os.open("../../.." + AIM["folder"] + "/secret", os.O_RDONLY, dir_fd=number) >= 0)
    attempt(lambda: not stat.S_ISCHR(os.fstat(number).st_mode) and os.read(number, 10) is not None and number > 4)
""",
)
