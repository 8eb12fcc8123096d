"""Clusters from names and files, one clear line for bad ones, and mesh axes on link levels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans.mesh import mesh_of

from autopar.cost_models.calibrate import local_cluster as local
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import GIB, presets
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.errors import ClusterError


@pytest.mark.parametrize("name", [name for name in presets() if name != "local"])
def test_presets(name: str) -> None:
    cluster = Cluster.parse(f"{name}:3")
    node = Cluster.parse(name).size
    assert node == (4 if name[0] == "g" else 8)  # beside Grace; a rack of some is one NVLink
    assert cluster.size == 3 * node and cluster.links[-1].devices == 3 * node
    assert cluster.links[0].devices == (cluster.size if "nvl72" in name else node)
    half = cluster.device.peak_flops_per_second("float16")
    card = cluster.links[0].name == "pcie"  # of a workstation
    assert half > (1.9 if card else 5) * cluster.device.peak_flops_per_second("float32")
    assert cluster.device.multiprocessors and cluster.device.generation
    assert cluster.host is not None and cluster.nvme is not None
    assert cluster.host.read_bytes_per_second > cluster.nvme.read_bytes_per_second
    assert (20 if card else 30) * GIB < cluster.device.memory_bytes < 300 * GIB
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


@pytest.mark.parametrize(("trays", "in_a_rack"), [(1, 4), (16, 64), (18, 72), (32, 64), (36, 72), (64, 64), (90, 72)])
def test_racks_are_filled_evenly(trays: int, in_a_rack: int) -> None:
    cluster = Cluster.parse(f"gb200-nvl72:{trays}")
    assert (cluster.size, cluster.links[0].devices) == (4 * trays, in_a_rack)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_link_names_its_network(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    link = "{name: ib, fabric: infiniband-ndr, devices: 8, bandwidth_gb_per_second: 45}"
    path.write_text(f"like: dgx-h100\nlinks: [nvlink, {link}]\n")
    ours, theirs = Cluster.parse(str(path)).links[1], Cluster.parse("dgx-h100").links[1]
    assert ours == replace(theirs, name="ib", bandwidth_bytes_per_second=45e9)
    for wrong in ("infiniband-nrd", "[1]"):
        path.write_text(f"like: dgx-h100\nlinks: [{{name: ib, fabric: {wrong}, devices: 8}}]\n")
        with pytest.raises(ClusterError, match="links has fabric .*: write one of infiniband, infiniband-edr"):
            Cluster.parse(str(path))


def test_a_preset_like_another(tmp_path: Path) -> None:
    """The figures of a device stand in one file."""
    one, other = Cluster.parse("dgx-h200"), Cluster.parse("aws-p5en")
    assert one.device == other.device and one.links[0] == other.links[0] and one.links[1] != other.links[1]
    assert Cluster.parse("dgx-b200").device == Cluster.parse("aws-p6-b200").device
    path = tmp_path / "mine.yaml"
    path.write_text("like: dgx-h100\ndevice: {memory_gib: 94}\nlinks: [nvlink]\n")
    mine, base = Cluster.parse(str(path)), Cluster.parse("dgx-h100")
    assert mine.device == replace(base.device, memory_bytes=94 * GIB) and mine.links == base.links[:1]
    path.write_text("like: dgx-h10\n")
    with pytest.raises(ClusterError, match="like is 'dgx-h10': write one of aws-p5en"):
        Cluster.parse(str(path))
    path.write_text("like: dgx-h100\nlinks: [nvlonk]\n")
    with pytest.raises(ClusterError, match="links has 'nvlonk': write a link, or the name of one of dgx-h100: nvlink"):
        Cluster.parse(str(path))


def test_no_product_above_the_measured_peak(tmp_path: Path) -> None:
    """An H100 was measured at 794.5 of 989 TFLOP/s in bfloat16, at 1402.6 of 1979 in float8."""
    path = tmp_path / "mine.yaml"
    path.write_text("like: dgx-h100\ndevice: {matmul_fraction: 0.81}\n")
    with pytest.raises(ClusterError, match=r"matmul_fraction is 0.81, .* reaches 0.803 of its peak \(bfloat16\): write at most"):
        Cluster.parse(str(path))
    path.write_text("like: dgx-h100\ndevice: {matmul_fraction: 0.8}\n")
    device = Cluster.parse(str(path)).device
    assert device.product_flops_per_second("bfloat16") == pytest.approx(0.8 * 989e12)
    assert device.product_flops_per_second("float8_e4m3fn") == pytest.approx(1402.6e12), "the share of bfloat16 is not reached"


def test_data_sheet_h100() -> None:
    """hardware_specs.csv: H100 SXM 80GB."""
    device = Cluster.parse("dgx-h100").device
    assert device.peak_flops_per_second("bfloat16") == pytest.approx(989e12)
    assert device.bandwidth_bytes_per_second == pytest.approx(3.35e12)
    assert device.peak_flops_per_second("float8_e4m3fn") == pytest.approx(1979e12)
    assert device.peak_flops_per_second("int8") == device.peak_flops_per_second("float32")


def test_data_sheet_v100() -> None:
    """No bf16."""
    device = Cluster.parse("dgx-v100").device
    assert device.peak_flops_per_second("bfloat16") == device.peak_flops_per_second("float32") == pytest.approx(15.7e12)


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
    ("old", "new", "where", "mend"),
    [
        ("memory_gib: 16", "memory_gib: -1", "device.memory_gib is -1", "write a number of at least 0"),
        ("memory_gib: 16, ", "", "device.memory_gib is missing", "add memory_gib"),
        ("memory_gib: 16", "memory_gib: 16, memory_bytes: 5", "device.memory_gib is given twice", "take one out"),
        ("size: 16", "size: 32", "size is 32", "raise its devices, or lower size"),
        ("size: 16", "size: many", "size is 'many'", "write a number"),
        ("size: 16", "size: 0", "size is 0", "at least 1"),
        ("devices: 16", "devices: 6", "links[1].devices is 6", "write a multiple of 4, as links[0] (nv) joins so many"),
        ("devices: 16, ", "", "links[1].devices is missing", "add devices"),
        ("float32: 10, ", "", "device.peak_tflops needs float32", "such as"),
        ("bfloat16: 100", "bfloat16: fast", "device.peak_tflops.bfloat16 is 'fast'", "write a number"),
        ("peak_tflops: {float32: 10, bfloat16: 100}", "peak_tflops: 3", "device.peak_tflops is 3", "rate of each dtype"),
        ("links:", "links: 5\nother:", "other is unknown", "write one of"),
        ("device: {name: X", "device: 5\nx: {name: X", "x is unknown", "take it out"),
        ("device: {name: X", "device: [4]\nnote: {name: X", "device is [4]", "such as {name: X"),
        ("name: two", "name: [a", "line 3", "autopar calibrate"),
        ("kind: cuda", "kind: cuda, colour: red", "device.colour is unknown", "memory_gib"),
        ("matmul_fraction: 0.5", "matmul_fraction: 50", "device.matmul_fraction is 50", "share"),
        ("bandwidth_gb_per_second: 10,", "bandwidth_gb_per_second: 0,", "links[1].bandwidth_gb_per_second is 0", "above 0"),
        ("latency_us: 4}", "latency_us: 4, kind: wire}", "links[1].kind is 'wire'", "one of switch, mesh"),
        ("latency_us: 4}", "latency_us: 4, oversubscription: 0.5}", "links[1].oversubscription is 0.5", "write 1"),
        ("latency_us: 4}", "latency_us: 4, factors: {all_reduce: 2}}", "links[1].factors is", "[1, 1]"),
        ("latency_us: 4}", "latency_us: fast}", "links[1].latency_us is 'fast'", "write a number"),
        ("size: 16", "size: 16\nalgorithms: [gossip]", "algorithms[0] is 'gossip'", "ring, tree"),
        ("size: 16", "size: 16\noverlap: {contention: 2}", "overlap.contention is 2", "below 1"),
        ("size: 16", "size: 16\noverlap: {blocking_sends: 2}", "overlap.blocking_sends is 2", "true or false"),
        ("size: 16", "size: 16\ncolour: red", "colour is unknown", "nvme"),
        ("size: 16", "size: 16\nhost: {name: PCIe}", "host.capacity_gib is missing", "add capacity_gib"),
        ("size: 16", "size: 16\ngroups: [{size: 3}]", "groups[0].device is missing", "add device"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str, where: str, mend: str) -> None:
    """One line: the file, the key's path as it is written in the file, and how to mend it."""
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace(old, new))
    assert path.read_text() != FILE
    with pytest.raises(ClusterError) as error:
        Cluster.parse(str(path))
    text = str(error.value)
    assert "\n" not in text and "c.yaml" in text and where in text and mend in text, text


def widths(cluster: Cluster, axis: int, **axes: int) -> list[tuple[str, int]]:
    return [(level.link.name, level.width) for level in links_of_axis(cluster, mesh_of(**axes), axis).levels]


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


SPINE = FILE.replace(
    "  - {name: ib, devices: 16, bandwidth_gb_per_second: 10, latency_us: 4}",
    """  - {name: ib, devices: 8, bandwidth_gb_per_second: 10, latency_us: 4}
  - {name: spine, devices: 16, bandwidth_gb_per_second: 10, latency_us: 8, oversubscription: 4, port: ib}""",
)


def parsed(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return Cluster.parse(str(path))


def test_a_spine_is_oversubscribed_and_reached_through_the_card(tmp_path: Path) -> None:
    cluster = parsed(tmp_path, SPINE)
    data, outer = (links_of_axis(cluster, mesh_of(dp=2, tp2=2, tp=4), axis) for axis in (0, 1))
    assert [(level.link.name, level.link.bandwidth_bytes_per_second) for level in data.levels] == [("spine", 2.5e9)]
    assert data.names == outer.names == {"ib"} and data.shares(outer)
    assert [level.width for level in links_of_axis(cluster, mesh_of(dp=16), 0).levels] == [4, 2, 2]


def test_a_full_mesh_has_a_cable_for_each_pair() -> None:
    """mi300x: two devices have one of seven cables."""
    cluster = Cluster.parse("mi300x")
    pair, node = (links_of_axis(cluster, mesh_of(dp=8 // n, tp=n), 1).levels[0] for n in (2, 8))
    assert pair.link.bandwidth_bytes_per_second == pytest.approx(node.link.bandwidth_bytes_per_second / 7)
    assert pair.peer_bandwidth_bytes_per_second == pytest.approx(node.peer_bandwidth_bytes_per_second)


TORUS = """
name: torus
size: 64
algorithms: [hierarchical]
device: {name: X, kind: cuda, peak_tflops: {float32: 10}, memory_gib: 16, bandwidth_gb_per_second: 1000,
  launch_us: 0, matmul_fraction: 0.5, attention_fraction: 0.5, bandwidth_fraction: 0.5, base_gib: 1}
links:
  - {name: ici, kind: torus, dimensions: [4, 4, 4], devices: 64, bandwidth_gb_per_second: 50, latency_us: 1}
"""


def test_a_torus_is_a_ring_for_each_dimension(tmp_path: Path) -> None:
    cluster = parsed(tmp_path, TORUS)
    assert widths(cluster, 0, dp=64) == [("ici0", 4), ("ici1", 4), ("ici2", 4)]
    assert widths(cluster, 0, dp=16, tp=4) == [("ici1", 4), ("ici2", 4)]
    whole, part = (links_of_axis(cluster, mesh_of(dp=64 // n, tp=n), 1) for n in (4, 2))
    one_ring, cut_ring = (link.levels[0].link.bandwidth_bytes_per_second for link in (whole, part))
    assert one_ring == 2 * cut_ring == pytest.approx(100e9)
    everyone = links_of_axis(cluster, mesh_of(dp=64), 0)
    expected = 9 * 1e-6 + 3 / 4 * 1e9 / 100e9  # the first dimension moves most
    assert collective_seconds("all_gather", 1e9, everyone) == pytest.approx(expected)
    with pytest.raises(ClusterError, match="dimensions of torus ici must multiply to 64"):
        parsed(tmp_path, TORUS.replace("[4, 4, 4]", "[4, 4]"))


def test_several_kinds_of_nodes(tmp_path: Path) -> None:
    """A synchronous step runs at the slowest device; the smallest memory must do."""
    both = Cluster.parse("dgx-h100:2+dgx-a100-40:1")
    fast, slow = Cluster.parse("dgx-h100:2"), Cluster.parse("dgx-a100-40:1")
    assert both.size == 24 and both.links[-1].devices == 24 and [group.size for group in both.groups] == [16, 8]
    assert both.device.peak_flops_per_second("bfloat16") == slow.device.peak_flops_per_second("bfloat16")
    assert both.device.memory_bytes == slow.device.memory_bytes < fast.device.memory_bytes
    for link, one, other in zip(both.links, fast.links, slow.links, strict=True):
        assert link.bandwidth_bytes_per_second == min(one.bandwidth_bytes_per_second, other.bandwidth_bytes_per_second)
        assert link.latency_seconds == max(one.latency_seconds, other.latency_seconds)
    assert "float8" not in dict(both.device.peak)
    assert "16 x H100 SXM 80GB and 8 x A100 SXM 40GB" in both.note and "slowest (A100 SXM 40GB)" in both.note
    assert not Cluster.parse("dgx-h100:2").note and not Cluster.parse("dgx-h100:1+dgx-h100:1").note
    assert Cluster.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    text = "groups: [{cluster: 'dgx-h100:2'}, {cluster: 'dgx-a100-40:1'}]"
    assert replace(parsed(tmp_path, text), name=both.name) == both
    with pytest.raises(ClusterError, match="equally many devices in a node"):
        Cluster.parse("dgx-h100:2+local:4")


def test_old_descriptions_are_read() -> None:
    """A plan of before the optional fields."""
    cluster = Cluster.parse("dgx-h100:2")
    data = cluster.to_dict()
    for key in ("host", "nvme", "algorithms", "groups"):
        del data[key]
    for key in ("generation", "multiprocessors"):
        del data["device"][key]
    known = ("name", "devices", "bandwidth_bytes_per_second", "latency_seconds")
    data["links"] = [{key: link[key] for key in known} for link in data["links"]]
    old = Cluster.from_dict(data)
    assert old.size == 16 and old.host is None and old.device.peak == cluster.device.peak
    assert widths(old, 0, dp=16) == widths(cluster, 0, dp=16)


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize("text", [BOMB, "[" * 20_000, "x: " + "y" * 200_000], ids=["aliases", "nesting", "length"])
def test_files_that_would_fill_the_memory_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(str(tmp_path / "c.yaml"))
    assert "\n" not in str(caught.value)


def test_a_name_without_a_number_is_as_large_as_the_launch() -> None:
    for processes, name, size in ((8, "dgx-h100:1", 8), (32, "dgx-h100:4", 32), (2, "dgx-h100:1/2", 2), (0, "dgx-h100", 8)):
        cluster = Cluster.parse("dgx-h100", processes=processes)
        assert (cluster.name, cluster.size) == (name, size)
        cluster.from_dict(cluster.to_dict())
    assert Cluster.parse("dgx-h100", processes=32) == Cluster.parse("dgx-h100:4")
    assert Cluster.parse("dgx-h100:2", processes=32).size == 16
    assert Cluster.parse("local", processes=3) == Cluster.parse("local:3")
    with pytest.raises(ClusterError, match="12 processes were launched, and a node of dgx-h100 has 8 devices: launch a"):
        Cluster.parse("dgx-h100", processes=12)
