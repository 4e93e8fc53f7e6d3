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
    from support.training import config, trained

    from sparrow.schema.schedule import Schedule

    Schedule.fixed(48, dense_layers=(0, 1)).save(made / "schedule.json")
    trained(
        config(
            model,
            made / "run",
            rollout={"attention": {"schedule": str(made / "schedule.json")}, "samples": 3},
            run={"steps": 3, "save_every": 1, "keep": 9, "tensorboard": True},
            validation={"every": 2, "rows": 2},
        )
    )
    return made / "run"


@pytest.fixture(scope="session")
def chat_model(made: Path) -> Path:
    from support.training import model_folder

    return model_folder(made / "chat", chat=True)


@pytest.fixture(scope="session")
def rows(made: Path) -> Path:
    """Forty prompts in a file, for `row_config`."""
    from support.rewards import row_file, verl

    prompts = [[{"role": "user", "content": f"{n} + {n + 1} = ?"}] for n in range(40)]
    return row_file(made / "rows.jsonl", [verl(n, prompt=p) for n, p in enumerate(prompts)])
