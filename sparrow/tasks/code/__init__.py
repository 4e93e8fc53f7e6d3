"""Rewards for programs: rows with tests, judged in a sandbox; a procedural family; HumanEval."""
