"""Fixtures of the tests of elastic jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.elastic_job import ElasticJob

EVERY = 5


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Makes jobs, of which nothing is left."""
    made: list[ElasticJob] = []

    def make(nodes: int, ranks: int, steps: int, **options: Any) -> ElasticJob:
        words = ["--steps", str(steps), "--every", str(EVERY), "--dtype", "float64"]
        made.append(ElasticJob(tmp_path, nodes, ranks, words, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()
