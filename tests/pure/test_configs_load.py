"""Every file in configs/ loads. Its folder is the verb, and the verb names the root class."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")

from sparrow import config

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*") if path.is_file())


def test_there_are_configs() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_loads_as_the_root_class_of_its_folder(path: Path) -> None:
    assert path.suffix == ".toml"
    verb = path.relative_to(CONFIGS).parts[0]
    root = getattr(config, f"{verb.capitalize()}Config")
    assert isinstance(config.load_config(root, [path]), root)
