"""Bundled clusters against the data sheets in tests/data/hardware_specs.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import presets

DATA = Path(__file__).parents[2] / "data" / "hardware_specs.csv"
SHEETS = {
    "dgx-v100": ("V100 SXM2 16GB", ""),  # the 32 GB part has the same chip
    "dgx-a100-40": ("A100 SXM 40GB", "DGX A100 SuperPOD (Selene, SC21)"),
    "dgx-a100": ("A100 SXM 80GB", "DGX A100 SuperPOD (Selene, SC21)"),
    "dgx-h100": ("H100 SXM 80GB", "DGX H100 NDR"),
    "dgx-h200": ("H200 SXM", "DGX H100 NDR"),
    "dgx-b200": ("B200 SXM", "DGX H100 NDR"),
    "dgx-b300": ("B300 SXM", "DGX B300 XDR"),
    "gb200-nvl72": ("GB200 SXM", "DGX H100 NDR"),
    "aws-p5en": ("H200 SXM", "AWS P5en EFA v3"),
    "aws-p6-b200": ("B200 SXM", "AWS P6-B200 EFA v4"),
    "mi300x": ("MI300X", ""),
    "gb300-nvl72": ("GB300 SXM", "DGX B300 XDR"),
    "gh200": ("GH200 SXM", ""),
    "mi325x": ("MI325X", ""),
    "mi355x": ("MI355X", ""),
    "rtx-3090": ("RTX 3090", ""),
    "rtx-a6000": ("RTX A6000", ""),
    "rtx-4090": ("RTX 4090", ""),
    "rtx-5090": ("RTX 5090", ""),
    "l40s": ("L40S", ""),
    "l4": ("L4", ""),
}


def rows() -> dict[str, dict[str, str]]:
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return {row["name"]: row for row in csv.DictReader(lines)}


def test_every_preset_has_a_sheet() -> None:
    assert set(SHEETS) == set(presets()) - {"local"}


@pytest.mark.parametrize("preset", SHEETS)
def test_devices(preset: str) -> None:
    device, row = Cluster.parse(preset).device, rows()[SHEETS[preset][0]]
    sheet = {"float32": "fp32_tflops", "tf32": "tf32_tflops", "float16": "fp16_bf16_dense_tflops", "float8": "fp8_dense_tflops"}
    printed = {dtype: float(row[column]) * 1e12 for dtype, column in sheet.items() if row[column]}
    ours = {dtype: peak for dtype, peak in device.peak if dtype in sheet}
    assert ours == pytest.approx(printed)
    columns = {"bfloat16": "measured_max_matmul_bf16_tflops", "float8": "measured_max_matmul_fp8_tflops"}
    measured = {dtype: float(row[column]) * 1e12 for dtype, column in columns.items() if row[column]}
    assert dict(device.measured_peak) == pytest.approx(measured)
    if preset != "dgx-v100":
        unit = 1e9 if preset == "dgx-b300" else 2**30  # of the figure that is printed
        most = 0.09 if preset in ("l4", "l40s") else 0.02  # with error correction in memory that has no extra bits for it
        assert device.memory_bytes == pytest.approx(float(row["mem_gb"]) * unit, rel=most)  # what the driver leaves
        assert device.bandwidth_bytes_per_second == pytest.approx(
            float(row["mem_bw_tbps"]) * 1e12, rel=0.02
        )  # printed to a digit


@pytest.mark.parametrize("preset", SHEETS)
def test_links_reach_most_of_what_is_printed(preset: str) -> None:
    """Collectives reach 0.7 to 1 of the sheet's rate in the node, 0.9 to 1 over the network cards."""
    cluster, (device, network) = Cluster.parse(preset), SHEETS[preset]
    inner, outer = cluster.links
    assert 0.7 <= inner.bandwidth_bytes_per_second / (float(rows()[device]["intra_node_gbps_per_direction"]) * 1e9) <= 1
    assert inner.switch_bandwidth_bytes_per_second < inner.bandwidth_bytes_per_second
    if network:
        assert (
            0.9 <= outer.bandwidth_bytes_per_second / (float(rows()[network]["inter_node_gbps_per_gpu_per_direction"]) * 1e9) <= 1
        )
    if rows()[device]["pcie_gbps_per_direction"]:
        assert cluster.host is not None
        assert 0.4 <= cluster.host.read_bytes_per_second / (float(rows()[device]["pcie_gbps_per_direction"]) * 1e9) <= 0.9
