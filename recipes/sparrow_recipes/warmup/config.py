"""The configuration of `sparrow warmup`: a small thinking model trained on puzzles."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sparrow.schema import types
from sparrow.schema.base import Record
from sparrow.schema.common import Device
from sparrow.schema.train import OptimiserConfig

MOST_STAGES = 64
Width = Annotated[int, Field(ge=1, le=2**16)]


class ShapeConfig(Record):
    """The model: a Qwen3 decoder with tied embeddings. The vocabulary is that of the puzzles."""

    name: types.FolderName
    layers: Annotated[int, Field(ge=1, le=1024)]
    hidden: Width
    intermediate: Width
    heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_size: Annotated[int, Field(ge=2, le=1024, multiple_of=2)] = 64
    max_positions: types.Tokens
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] = 1e6
    seed: types.Seed = 0
    # Weights to begin with, a folder; None: drawn from the seed. Where that model's MLPs are wider,
    # the channels that weigh most are kept.
    start: types.Name | None = None


class StageConfig(Record):
    """A stage of training: steps, tokens a step, and lengths of chains."""

    steps: types.Steps
    tokens: Annotated[int, Field(ge=1024, le=2**20)]
    shortest: Annotated[int, Field(ge=100, le=8000)] = 100
    longest: Annotated[int, Field(ge=100, le=8000)]

    def _check(self) -> None:
        allowed = f"at most longest, which is {self.longest}"
        self.require(self.shortest <= self.longest, "shortest", allowed)


class DataConfig(Record):
    """The shares of puzzle families among the documents; 0: none."""

    seed: types.Seed = 0
    assignments: types.Share = 1.0
    countdown: types.Share = 1.0
    graph: types.Share = 1.0
    revisit: bool = True  # whether chains may repeat what they have done before

    def _check(self) -> None:
        some = self.assignments + self.countdown + self.graph
        self.require(some, "assignments", "at least one share above 0")


class WarmupRunConfig(Record):
    """Device, dtype and outputs."""

    out: types.Directory | None = None  # None: runs/warmup/NAME
    _older = types.older_out
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the products; weights are float32
    workers: Annotated[int, Field(ge=0, le=256)] = 0  # processes that make puzzles ahead
    save_every: types.Steps = 500  # between checkpoints


class WarmupConfig(Record):
    """`sparrow warmup`."""

    model: ShapeConfig
    data: DataConfig = DataConfig()
    stages: tuple[StageConfig, ...]
    optimiser: OptimiserConfig = OptimiserConfig()
    run: WarmupRunConfig = WarmupRunConfig()

    shortcuts: ClassVar = {"device": "run.device", "out": "run.out"}

    def _check(self) -> None:
        # Not by min_length: that would also count a stage that was refused.
        count = len(self.stages)
        self.require(1 <= count <= MOST_STAGES, "stages", f"1 to {MOST_STAGES} stages", count)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)
