"""Untrusted Python programs in isolation: backends, limits, and a self-test that refuses leaks."""
