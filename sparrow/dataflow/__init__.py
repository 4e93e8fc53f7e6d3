"""Dataflow: who runs where and when. The one room that sees tasks, engine and train."""
