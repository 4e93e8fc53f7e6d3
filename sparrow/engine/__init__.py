"""Rollout: the engine, its asyncio form, and a readable loop that both are compared with."""

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine, Output
from sparrow.engine.generate import generate

__all__ = ["AsyncEngine", "Engine", "Output", "generate"]
