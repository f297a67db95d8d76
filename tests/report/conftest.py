"""A prediction made by hand."""

import pytest
from tests.report.hand_made import hand_made_prediction


@pytest.fixture
def prediction():
    return hand_made_prediction()
