"""Rollout and learning at the same time: who answers which prompt, and what becomes of it."""
