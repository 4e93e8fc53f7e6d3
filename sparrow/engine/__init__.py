"""Rollout: the engine, its asyncio form, and a readable loop that both are compared with."""

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.engine.loop import Output
from sparrow.engine.readable import generate

__all__ = ["AsyncEngine", "Engine", "Output", "generate"]
