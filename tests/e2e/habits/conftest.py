"""The habits of each module as parameters of its tests."""

from __future__ import annotations

import pytest
from support.harness.habits import rows_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "habit" in metafunc.fixturenames:
        metafunc.parametrize("habit", rows_of(vars(metafunc.module)))
