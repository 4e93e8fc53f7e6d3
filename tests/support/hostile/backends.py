"""Kinds that a backend answers in its own way: what they print or how they end harms nothing.

What they leave outside is looked for all the same.
"""

_NO_THREADS = "it ends at once: there are no threads, signals or system calls"
_NO_EFFECT = "WASI's chmod and utime do nothing and say so of no file"
_OWN_KERNEL = "/proc and /dev are of gVisor's own kernel, with nothing of this machine"
HARMLESS: dict[str, dict[str, str]] = {
    "wasm": {
        "modes and owners outside": _NO_EFFECT,
        "changing the harness or the interpreter": _NO_EFFECT,
        "cpu up to the hard limit": "its clock of CPU time counts the time of the module's start",
    }
    | dict.fromkeys(
        (
            "cpu with signals blocked, in threads",
            "cpu with timers and a higher limit",
            "cpu in the kernel",
            "cpu between two ticks of the clock",
            "waiting for nothing",
            "streams closed, a thread goes on",
            "output to both from threads",
            "output after the end of the reader",
            "no end of the process",
        ),
        _NO_THREADS,
    ),
    "gvisor": dict.fromkeys(
        ("memory and descriptors by /proc", "/proc and /sys of the kernel", "devices"), _OWN_KERNEL
    ),
}
