"""The allocator model: what is allocated, reserved, shown and needed at least; communicators; the margin."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.hardware.allocator import (
    ALLOCATED_ONCE,
    COMMUNICATOR_BYTES,
    FRAGMENTATION,
    MEMORY_MARGIN,
    communicator_count,
    device_memory,
    process_bytes,
    tensor_budget_bytes,
)
from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.hardware.cluster_file import presets
from autopar.cost_models.step.memory_events import KINDS, VARYING
from autopar.errors import AutoparError
from autopar.ir.mesh import Axis, Mesh

GPU, CPU = Cluster.parse("dgx-h100:1").device, Cluster.parse("local:2").device
sizes = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 2**40))


@given(sizes, st.integers(0, 9))
def test_shown_is_above_reserved_is_above_allocated(tensors: dict[str, int], communicators: int) -> None:
    found = device_memory(tensors, GPU, communicators)
    assert found.allocated == sum(size for kind, size in tensors.items() if kind not in ("slack", "base"))
    assert found.allocated <= found.reserved <= (1 + FRAGMENTATION) * found.allocated
    assert found.shown == pytest.approx(found.reserved + GPU.base_bytes + communicators * COMMUNICATOR_BYTES)
    assert found.least == pytest.approx(found.allocated + process_bytes(GPU, communicators))
    (on_cpu, plain) = device_memory(tensors, CPU, communicators), found.allocated
    assert (on_cpu.allocated, on_cpu.reserved, on_cpu.shown) == (plain, plain, plain + CPU.base_bytes)


def test_what_lives_from_step_to_step_is_not_fragmented() -> None:
    assert {*ALLOCATED_ONCE, *VARYING, "slack", "base"} == set(KINDS)
    for kind in (*ALLOCATED_ONCE, *VARYING):
        found = device_memory({kind: 1000}, GPU, 0)
        assert found.reserved == (1000 if kind in ALLOCATED_ONCE else 1000 * (1 + FRAGMENTATION))


@pytest.mark.parametrize(
    ("axes", "group", "stages", "count"),
    [
        ({"dp": 1}, 0, 1, 0),
        ({"dp": 8}, 0, 1, 1),  # that of all ranks
        ({"dp": 8}, 4, 1, 3),
        ({"dp": 4, "tp": 2}, 0, 1, 3),
        ({"dp": 4, "tp": 2}, 0, 4, 4),
        ({"dp": 1, "tp": 8}, 0, 2, 3),
    ],
)
def test_a_communicator_for_each_axis_and_for_all_ranks(axes: dict[str, int], group: int, stages: int, count: int) -> None:
    mesh = Mesh(tuple(Axis(name, size) for name, size in axes.items()))
    assert communicator_count(mesh, group, stages) == count


def test_every_preset_has_one_model_and_no_factors_of_its_own() -> None:
    for name in presets():
        device = Cluster.parse(name).device
        assert device.communicator_bytes == (0 if device.kind == "cpu" else COMMUNICATOR_BYTES)
        assert device.memory_margin == 0 and device.budget_bytes == device.memory_bytes
        assert Cluster.from_dict(Cluster.parse(name).to_dict()).device == device


def test_the_margin_is_inside_of_the_budget() -> None:
    cluster = with_memory_margin(Cluster.parse("dgx-h100:1+dgx-a100:1"), 0.25)
    for device in (cluster.device, *(group.device for group in cluster.groups)):
        assert device.memory_margin == 0.25 and device.budget_bytes == int(0.75 * device.memory_bytes)
        assert tensor_budget_bytes(device, 2) == device.budget_bytes - device.base_bytes - 2 * device.communicator_bytes
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert with_memory_margin(cluster) == cluster  # what its file says
    assert with_memory_margin(Cluster.parse("local:2")).device.memory_margin == MEMORY_MARGIN
    assert with_memory_margin(cluster, 0).device.memory_margin == 0


@pytest.mark.parametrize("margin", [-0.1, 1, 1.5, float("nan"), "0.1", True])
def test_a_margin_that_is_no_share_is_refused_in_one_line(margin: float) -> None:
    with pytest.raises(AutoparError, match=r"is no share of memory: write 0 \(none\) or more, below 1") as error:
        with_memory_margin(Cluster.parse("local:2"), margin)
    assert "\n" not in str(error.value)


def test_a_file_may_say_what_a_communicator_takes() -> None:
    data = Cluster.parse("dgx-h100:1").to_dict()
    assert Cluster.from_dict(data).device == GPU
    data["device"]["communicator_bytes"] = 0
    assert Cluster.from_dict(data).device == replace(GPU, communicator_bytes=0)
    del data["device"]["communicator_bytes"]
    assert Cluster.from_dict(data).device == GPU
