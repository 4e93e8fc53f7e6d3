"""Strict configuration: TOML files left to right, then `--section.key=value`, saved with the run.

Whatever is wrong is said at the start, with the key, what was given, what is allowed and where it
came from. This is the only room that knows pydantic. It loads no torch.
"""

from sparrow.config.errors import ConfigError
from sparrow.config.loading import load_config
from sparrow.config.resolved import save_resolved
from sparrow.config.schema import (
    AttentionConfig,
    GenerateConfig,
    GenerateSampling,
    ModelConfig,
    RunConfig,
    Section,
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
    "AttentionConfig",
    "ConfigError",
    "DataConfig",
    "GenerateConfig",
    "GenerateSampling",
    "ModelConfig",
    "OptimiserConfig",
    "RunConfig",
    "Section",
    "ShapeConfig",
    "StageConfig",
    "WarmupConfig",
    "WarmupRunConfig",
    "load_config",
    "save_resolved",
]
