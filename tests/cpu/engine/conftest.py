import pytest
from support.engines import engine_of, tiny

from sparrow import models
from sparrow.engine import Engine


@pytest.fixture(scope="session")
def model() -> models.Decoder:
    """For tests that leave its weights alone."""
    return tiny()


@pytest.fixture
def engine(model: models.Decoder) -> Engine:
    return engine_of(model)
