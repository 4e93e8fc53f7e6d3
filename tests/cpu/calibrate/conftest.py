"""What tests of calibration share."""

import pytest
from support.engines import tiny

from sparrow.models import Decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny()
