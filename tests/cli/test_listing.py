"""``autopar clusters``: every preset with its levels."""

from __future__ import annotations

import pytest

from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import presets


def test_every_level_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    where = [next(i for i, line in enumerate(lines) if line.split()[:1] == [name] and i > len(presets())) for name in presets()]
    for name, begin in zip(presets(), where, strict=True):
        cluster = Cluster.parse(name)
        shown = [lines[begin].split(None, 1)[1], *(line.strip() for line in lines[begin + 1 : begin + 5])]
        for level, line in zip(cluster.links, shown, strict=False):
            assert line.startswith(level.name) and f"{level.bandwidth_bytes_per_second / 1e9:.4g}" in line
        for store in filter(None, (cluster.host, cluster.nvme)):
            assert any(line.startswith(store.name) and f"{store.read_bytes_per_second / 1e9:.4g} in" in line for line in shown)
