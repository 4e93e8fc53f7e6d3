"""The schema classes themselves."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from pydantic import ValidationError

from sparrow.schema.common import GenerateConfig, ModelConfig, RunConfig


def test_importing_the_configuration_loads_no_torch() -> None:
    script = "import sys, sparrow.schema.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("section", [GenerateConfig, ModelConfig, RunConfig])
def test_sections_are_frozen_and_hashable(section: Any) -> None:
    config = section()
    assert hash(config) == hash(section())
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, next(iter(section.model_fields)), None)


@pytest.mark.parametrize("section", [GenerateConfig, ModelConfig, RunConfig])
def test_what_may_be_none_is_none_by_default(section: Any) -> None:
    """Otherwise a None that was set would be lost in config.resolved.toml."""
    for field in section.model_fields.values():
        assert type(None) not in getattr(field.annotation, "__args__", ()) or field.default is None
