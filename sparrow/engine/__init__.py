"""Rollout. `generate` is the readable loop: one static batch over the page cache."""

from sparrow.engine.generate import generate

__all__ = ["generate"]
