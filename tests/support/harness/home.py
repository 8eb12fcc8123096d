"""A home folder for one test session, so that tests neither read nor write the user's measurements and plans.

It holds the bundled descriptions of ``local:N`` as if they had been measured: no test waits for a measurement that it does not
ask for, and plans do not depend on how busy the machine was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.harness.rank_pool import RankPool

PROCESSES = (1, 2, 4, 8)


def measured(processes: int) -> Any:
    """What `local_cluster.measure_local` gives, with the bundled description."""
    from autopar.cost_models.calibrate import local_cluster
    from autopar.cost_models.calibrate.fit import Calibration
    from autopar.cost_models.calibrate.measure import CalibrationRun

    quiet = CalibrationRun({}, (), (), slowdown=1.0)
    return Calibration(local_cluster.default_local_cluster(processes), quiet, ())


def write_local_clusters(folder: Path) -> None:
    """Into the folder that `measured_local_cluster` reads."""
    from autopar.cost_models.calibrate import local_cluster

    with patch.object(local_cluster, "measure_local", measured):
        for processes in PROCESSES:
            local_cluster.measured_local_cluster(processes, folder)


@contextmanager
def ranks_in_a_home() -> Iterator[RankPool]:
    """A pool of ranks for a script, in a home of its own."""
    with tempfile.TemporaryDirectory(prefix="autopar_home_") as home:
        os.environ["HOME"] = home
        write_local_clusters(Path(home) / ".cache" / "autopar")
        ranks = RankPool()
        try:
            yield ranks
        finally:
            ranks.close()
