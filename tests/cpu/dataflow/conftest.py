"""Models and runs that the tests of the loop share: made once a process."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="session")
def model(made: Path) -> Path:
    from support.training import model_folder

    return model_folder(made / "model")


@pytest.fixture(scope="session")
def done(model: Path, made: Path) -> Path:
    """A sparse run of three steps with all its checkpoints. Copy it before you change it."""
    from support.training import SPARSE, config, trained

    trained(
        config(
            model,
            made / "run",
            rollout={"attention": SPARSE, "samples": 3},
            run={"steps": 3, "save_every": 1, "keep": 9, "tensorboard": True},
            validation={"every": 2, "rows": 2},
        )
    )
    return made / "run"
