"""The documents of the warm-up: puzzles with gold chains, by step.

The documents of a step are a function of the configuration and the step alone: any process can
make them, and a resumed run goes on with the ones it would have seen. Imports no torch, so that
processes that only make documents start at once.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.episode import Document
from sparrow.tasks import PUZZLES, Assignments, GraphPath
from sparrow.tasks.base import EOS, Puzzle, encode, keyed_random
from sparrow_recipes.warmup.config import DataConfig, StageConfig, WarmupConfig

EVALUATION = 1 << 20  # seeds below are for evaluation, seeds from here on for training
SEEDS = 1 << 48
TRIES = 1000  # documents in a row that may be too long


class PuzzleDocuments(Record):
    """Documents of a step: families by their shares, lengths evenly on a log scale."""

    data: DataConfig
    stages: tuple[StageConfig, ...]
    context: int

    @classmethod
    def of(cls, config: WarmupConfig) -> "PuzzleDocuments":
        context = config.model.max_positions
        return cls(data=config.data, stages=config.stages, context=context)

    @property
    def worker(self) -> tuple[str, dict[str, Any]]:
        """Target and arguments of a worker process that makes the same documents."""
        return f"{__name__}:make_documents", to_dict(self)

    def __call__(self, step: int) -> list[Document]:
        stage = self._stage(step)
        rng = keyed_random("documents", self.data.seed, step)
        documents: list[Document] = []
        tokens = 0
        while True:
            document = self._fitting(rng, stage)
            tokens += len(document)
            if tokens > stage.tokens:
                return documents
            documents.append(document)

    def _stage(self, step: int) -> StageConfig:
        ends = list(accumulate(stage.steps for stage in self.stages))
        if step >= ends[-1]:
            raise ValueError(f"step {step} is after the last stage")
        return self.stages[bisect_right(ends, step)]

    def _fitting(self, rng: Random, stage: StageConfig) -> Document:
        """The next document that fits into the context and the stage's tokens."""
        room = min(self.context, stage.tokens)
        for _ in range(TRIES):
            document = self._draw(rng, stage)
            if len(document) <= room:
                return document
        raise ValueError(
            f"none of {TRIES} documents with chains of {stage.shortest} to {stage.longest} tokens "
            f"fits into {room}; make the stage's chains shorter, or its tokens and the context more"
        )

    def _draw(self, rng: Random, stage: StageConfig) -> Document:
        shares = [getattr(self.data, name) for name in PUZZLES]
        name = rng.choices(list(PUZZLES), shares)[0]
        ratio = stage.longest / stage.shortest
        length = round(stage.shortest * ratio ** rng.random())
        puzzle = PUZZLES[name]
        if isinstance(puzzle, Assignments | GraphPath):
            puzzle = replace(puzzle, revisit=self.data.revisit)
        return document(puzzle, rng.randrange(EVALUATION, SEEDS), length)


def make_documents(**plain: Any) -> Callable[[int], list[dict[str, Any]]]:
    """The work of a worker process: the documents of a step as JSON."""
    maker = from_dict(PuzzleDocuments, plain)
    return lambda step: [to_dict(document) for document in maker(step)]


def document(puzzle: Puzzle, seed: int, length: int) -> Document:
    """A row of a puzzle with one of its gold chains."""
    row = puzzle.row(seed, length)
    prompt = encode(row.prompt)
    chain = encode(f"{puzzle.chain(row, seed)} {EOS}")
    return Document(ids=np.array(prompt + chain, dtype=np.int32), prompt=len(prompt))
