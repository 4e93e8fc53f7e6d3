"""Strict configuration: TOML files left to right, then `--section.key=value`, saved with the run.

Whatever is wrong is said at the start, with the key, what was given, what is allowed and where it
came from. This is the only room that knows pydantic. It loads no torch.
"""

from sparrow.config.code import code_settings
from sparrow.config.errors import ConfigError
from sparrow.config.loading import load_config
from sparrow.config.resolved import read_resolved, save_resolved
from sparrow.config.schema import (
    AttentionConfig,
    GenerateConfig,
    GenerateSampling,
    ModelConfig,
    RunConfig,
    Section,
)
from sparrow.config.study import ArmConfig, OutcomeConfig, ProbeConfig, StudyConfig, SurfaceConfig
from sparrow.config.train import (
    AlgorithmConfig,
    BatchConfig,
    Choice,
    GateConfig,
    RateConfig,
    RolloutConfig,
    RowsConfig,
    TrainConfig,
    TrainModelConfig,
    TrainRunConfig,
    ValidationConfig,
)
from sparrow.config.warmup import (
    DataConfig,
    OptimiserConfig,
    ShapeConfig,
    StageConfig,
    WarmupConfig,
    WarmupRunConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ArmConfig",
    "AttentionConfig",
    "BatchConfig",
    "Choice",
    "ConfigError",
    "DataConfig",
    "GateConfig",
    "GenerateConfig",
    "GenerateSampling",
    "ModelConfig",
    "OptimiserConfig",
    "OutcomeConfig",
    "ProbeConfig",
    "RateConfig",
    "RolloutConfig",
    "RowsConfig",
    "RunConfig",
    "Section",
    "ShapeConfig",
    "StageConfig",
    "StudyConfig",
    "SurfaceConfig",
    "TrainConfig",
    "TrainModelConfig",
    "TrainRunConfig",
    "ValidationConfig",
    "WarmupConfig",
    "WarmupRunConfig",
    "code_settings",
    "load_config",
    "read_resolved",
    "save_resolved",
]
