"""Measured collectives in cluster files: read back as they were written, refused in one line, and not asked of old files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autopar.cost_models.hardware.bottleneck import bottleneck_of
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import in_human_units
from autopar.cost_models.hardware.device_specs import NodeGroup
from autopar.cost_models.hardware.measured_collectives import MeasuredCollective, PiecewiseLinear
from autopar.cost_models.step.stage_devices import cluster_for_bounds
from autopar.errors import ClusterError

FILE = """
device:
  {name: X, kind: cpu, peak_tflops: {float32: 0.1}, memory_gib: 16, bandwidth_gb_per_second: 10, launch_us: 5,
   matmul_fraction: 0.5, attention_fraction: 0.5, bandwidth_fraction: 0.5, base_gib: 1}
size: 4
links:
- name: loopback
  devices: 4
  bandwidth_gb_per_second: 1
  latency_us: 100
"""
MEASURED = """  measured:
  - {kind: parameter_gather, width: 4, by_bytes_us: {67108864: 200000, 65536: 900, 16777216: 23000}}
  - {kind: all_reduce, width: 4, by_bytes_us: {4096: 500, 4194304: 9000}}
"""
TABLE = PiecewiseLinear((2.0**16, 2.0**24, 2.0**26), (9e-4, 23e-3, 200e-3))


def read(folder: Path, text: str) -> Cluster:
    path = folder / "c.yaml"
    path.write_text(text)
    return Cluster.parse(str(path))


def test_round_trips(tmp_path: Path) -> None:
    found = read(tmp_path, FILE + MEASURED)
    first, second = found.links[0].measured
    assert (first.kind, first.width) == ("parameter_gather", 4) and second.kind == "all_reduce"
    assert first.table.sizes == TABLE.sizes and first.table.seconds == pytest.approx(TABLE.seconds)
    assert Cluster.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    again = read(tmp_path, yaml.safe_dump(in_human_units(found.to_dict()), sort_keys=False))
    assert again.links[0].measured == found.links[0].measured


def test_a_file_without_tables(tmp_path: Path) -> None:
    """As they were written before, also as plain data."""
    found = read(tmp_path, FILE)
    assert found.links[0].measured == () and "measured" not in in_human_units(found.to_dict())["links"][0]
    old = found.to_dict()
    del old["links"][0]["measured"]
    assert Cluster.from_dict(old) == found and cluster_for_bounds(found) is found


@pytest.mark.parametrize(
    ("old", "new", "where", "mend"),
    [
        ("kind: all_reduce", "kind: gossip", "links[0].measured[1].kind is 'gossip'", "write one of all_gather"),
        ("kind: all_reduce, ", "", "links[0].measured[1] is", "write kind, width and by_bytes_us"),
        ("width: 4, by_bytes_us: {4096", "width: 1, by_bytes_us: {4096", "links[0].measured[1].width is 1", "at least 2"),
        ("{4096: 500, 4194304: 9000}", "{4096: 500}", "links[0].measured[1].by_bytes_us is {4096", "at least two sizes"),
        ("{4096: 500, 4194304: 9000}", "7", "links[0].measured[1].by_bytes_us is 7", "at least two sizes"),
        ("4194304: 9000", "4194304: 90", "falls from 4096 to 4194304 bytes", "do not fall"),
        ("4096: 500", "4096: 0", "has no time for 4096 bytes", "above 0"),
        ("4096: 500", "4096: -5", "links[0].measured[1].by_bytes_us.4096 is -5", "at least 0"),
        ("4096: 500", "many: 500", "links[0].measured[1].by_bytes_us is {'many'", "as numbers"),
        ("4096: 500", "4096: 500, '4096': 500", "has 4096 bytes twice", "take one out"),
        ("kind: all_reduce", "kind: parameter_gather", "links[0].measured has parameter_gather twice", "take one out"),
        ("  latency_us: 100", "  latency_us: 100\n  kind: ring", "links[0].measured is of a ring", "take it out"),
        ("  measured:", "  measured: 3\n  x:", "links[0].x is unknown", "measured"),
    ],
)
def test_invalid_tables(tmp_path: Path, old: str, new: str, where: str, mend: str) -> None:
    text = (FILE + MEASURED).replace(old, new)
    assert text != FILE + MEASURED
    with pytest.raises(ClusterError) as error:
        read(tmp_path, text)
    said = str(error.value)
    assert "\n" not in said and "c.yaml" in said and where in said and mend in said, said


def test_prices_for_bounds_and_of_several_links() -> None:
    """Only activations' collectives lose what makes large messages dear; tables of different links are of none."""
    local = Cluster.parse("local:4")
    tables = (MeasuredCollective("all_gather", 4, TABLE), MeasuredCollective("parameter_gather", 4, TABLE))
    (link,) = local.links
    measured = replace(local, links=(replace(link, measured=tables),))
    assert [each.for_bounds for each in cluster_for_bounds(measured).links[0].measured] == [True, False]
    state = replace(local, links=(replace(link, measured=tables[1:]),))
    assert cluster_for_bounds(state) is state
    groups = (NodeGroup(replace(local.device, fresh_page_bytes_per_second=1e9), measured.links, 4),)
    (group,) = cluster_for_bounds(replace(local, groups=groups)).groups
    assert group.device == local.device and group.links == cluster_for_bounds(measured).links
    assert bottleneck_of([link, measured.links[0]]).measured == () and bottleneck_of([link, link]) == link
