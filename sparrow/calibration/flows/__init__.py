"""Tests of flows: correctness, acceptance on a real model, attention error."""
