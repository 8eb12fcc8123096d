"""What `fit` says of the errors of published runs is what validation says."""

from __future__ import annotations

import pytest
from support.oracles.published_rows import session, table
from support.published_runs import all_residuals

from autopar.software.spending import fitting_share, quantile, step_interval, stored_residuals
from autopar.validate.report import report


@pytest.mark.slow
def test_stored_residuals_are_those_of_the_table() -> None:
    """Else ``python tests/benchmarks/store_measured_runs.py --residuals`` is due."""
    found = all_residuals(report(session().price(table().values())).points)
    for kind, pairs in stored_residuals().items():
        assert [source for source, _ in pairs] == [source for source, _ in found[kind]]
        assert [value for _, value in pairs] == pytest.approx([value for _, value in found[kind]], abs=2e-3)


def test_shares_and_intervals() -> None:
    assert quantile([("a", 0.1), ("a", 0.2), ("b", 0.5)], 0.5) == 0.2
    assert fitting_share(10.0, 100.0) == pytest.approx(1.0) and fitting_share(100.0, 10.0) == 0.0
    low, high = step_interval(10.0, mixture=False)
    assert low < 10.0 < high
