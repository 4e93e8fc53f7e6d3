"""Faster versions for CPUs. numba compiles them on the user's machine; no compiler is needed."""
