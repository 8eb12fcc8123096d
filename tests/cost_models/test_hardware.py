"""Clusters from names and files, one clear line for bad ones, and mesh axes on link levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.candidates import mesh_of

from autopar.cost_models import local
from autopar.cost_models.hardware import GIB, Cluster, links_of_axis, presets
from autopar.errors import ClusterError


@pytest.mark.parametrize("name", [name for name in presets() if name != "local"])
def test_presets(name: str) -> None:
    cluster = Cluster.parse(f"{name}:3")
    assert cluster.size == 24 and cluster.links[-1].devices == 24 and cluster.links[0].devices == 8
    assert cluster.device.peak_flops_per_second("bfloat16") > cluster.device.peak_flops_per_second("float32")
    assert 30 * GIB < cluster.device.memory_bytes < 200 * GIB
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_data_sheet_h100() -> None:
    """hardware_specs.csv: H100 SXM 80GB."""
    device = Cluster.parse("dgx-h100").device
    assert device.peak_flops_per_second("bfloat16") == pytest.approx(989e12)
    assert device.bandwidth_bytes_per_second == pytest.approx(3.35e12)
    assert device.peak_flops_per_second("float8") == device.peak_flops_per_second("float32")


def test_local_is_fixed_but_for_memory() -> None:
    one, four = Cluster.parse("local"), Cluster.parse("local:4")
    assert four.size == 4 and four == Cluster.parse("local:4")
    assert (
        four.device.memory_bytes == local.machine_memory_bytes() // 4 and one.device.memory_bytes == local.machine_memory_bytes()
    )


BAD = ["dgx-h10:1", "dgx-h100:0", "dgx-h100:x", "", "missing.yaml"]


@pytest.mark.parametrize("text", BAD)
def test_bad_names(text: str) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    assert "\n" not in str(error.value)


FILE = """
name: two
size: 16
device: {name: X, kind: cuda, peak_tflops: {float32: 10, bfloat16: 100}, memory_gib: 16, bandwidth_gb_per_second: 1000,
  launch_us: 5, matmul_fraction: 0.5, attention_fraction: 0.5, bandwidth_fraction: 0.5, base_gib: 1}
links:
  - {name: nv, devices: 4, bandwidth_gb_per_second: 100, latency_us: 1}
  - {name: ib, devices: 16, bandwidth_gb_per_second: 10, latency_us: 4}
"""


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    cluster = Cluster.parse(str(path))
    assert (
        cluster.name == "two" and cluster.device.launch_seconds == pytest.approx(5e-6) and cluster.device.memory_bytes == 16 * GIB
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory_gib: 16", "memory_gib: -1"),
        ("memory_gib: 16, ", ""),
        ("size: 16", "size: 32"),
        ("size: 16", "size: many"),
        ("devices: 16", "devices: 6"),
        ("float32: 10, ", ""),
        ("peak_tflops: {float32: 10, bfloat16: 100}", "peak_tflops: 3"),
        ("links:", "links: 5\nother:"),
        ("name: two", "name: [a"),
        ("kind: cuda", "kind: cuda, colour: red"),
        ("bandwidth_gb_per_second: 10,", "bandwidth_gb_per_second: 0,"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace(old, new))
    assert path.read_text() != FILE
    with pytest.raises(ClusterError) as error:
        Cluster.parse(str(path))
    assert "\n" not in str(error.value) and "c.yaml" in str(error.value)


def widths(cluster: Cluster, axis: int, **axes: int) -> list[tuple[str, int]]:
    return [(level.name, level.width) for level in links_of_axis(cluster, mesh_of(**axes), axis).levels]


def test_axes_on_levels() -> None:
    """Ranks are row-major: the last axis joins neighbours."""
    cluster = Cluster.parse("dgx-h100:8")
    assert widths(cluster, 1, dp=8, tp=8) == [("nvlink", 8)]
    assert widths(cluster, 0, dp=8, tp=8) == [("infiniband", 8)]
    assert widths(cluster, 0, dp=16, tp=4) == [("nvlink", 2), ("infiniband", 8)]
    assert widths(cluster, 0, dp=64) == [("nvlink", 8), ("infiniband", 8)]
    assert widths(cluster, 1, dp=2, tp=32) == [("nvlink", 8), ("infiniband", 4)]
    assert widths(cluster, 1, dp=4, tp=2, tp2=8) == [("infiniband", 2)]
    assert widths(cluster, 1, dp=64, tp=1) == []
    with pytest.raises(ClusterError, match="32 ranks"):
        links_of_axis(cluster, mesh_of(dp=32), 0)


def test_groups_that_straddle_nodes_run_at_the_slow_link() -> None:
    cluster = Cluster.parse("dgx-h100:3")
    assert widths(cluster, 1, dp=4, tp=6) == [("nvlink", 2), ("infiniband", 3)]
    assert widths(cluster, 0, dp=8, tp=3) == [("infiniband", 8)]


def test_cache_of_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once, read back afterwards, and anew where the file is broken."""
    calls = []
    monkeypatch.setattr(local, "measure_local", lambda n: calls.append(n) or local.described(n))
    first = Cluster.parse("local:2", tmp_path / "deep")
    assert Cluster.parse("local:2", tmp_path / "deep") == first and calls == [2]
    (file,) = (tmp_path / "deep").iterdir()
    file.write_text("{")
    assert Cluster.parse("local:2", tmp_path / "deep") == first and calls == [2, 2]


def test_link_from_two_sizes() -> None:
    """t = 2 (n-1) a + 2 (n-1)/n N / b, solved for a and b."""

    def seconds(size: float) -> float:
        return 6 * 1e-4 + 6 / 4 * size / 2e9

    seen = [{"collectives": [(1024, seconds(1024)), (2**23, seconds(2**23))]}] * 4
    assert local._link(4, seen) == pytest.approx((2e9, 1e-4))


@pytest.mark.slow
def test_measure_local() -> None:
    cluster = local.measure_local(2)
    assert cluster.size == 2 and cluster.device.kind in ("cpu", "cuda") and cluster.links[0].bandwidth_bytes_per_second > 1e6
