"""ZeRO's memory against the paper's table, its wire volume, and what this program keeps."""

from __future__ import annotations

import pytest

from autopar.cost_models.hardware import AxisLink, Cluster, Level
from autopar.cost_models.state import (
    Group,
    StateMemory,
    StatePolicy,
    optimizer_named,
    optimizer_seconds,
    state_cost,
    state_memory,
)
from autopar.ir.plan import Precision

TABLE = {
    # ZeRO, arXiv 1910.02054, Table 1: GB per device, by model (1e9 parameters), stage and number of data ranks
    (7.5, 1): {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
    (7.5, 2): {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
    (7.5, 3): {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12},
    (128, 1): {1: 2048, 4: 896, 16: 608, 64: 536, 256: 518, 1024: 513},
    (128, 2): {1: 2048, 4: 704, 16: 368, 64: 284, 256: 263},
    (1000, 1): {1: 16000, 4: 7000, 16: 4750, 64: 4187, 256: 4046, 1024: 4011},
    (1000, 2): {1: 16000, 4: 5500, 16: 2875, 64: 2218, 256: 2054, 1024: 2013},
    (1000, 3): {1: 16000, 4: 4000, 16: 1000, 64: 250, 256: 62.5, 1024: 15.6},
    (7.5, 0): {64: 120},  # Figure 1
}
ROWS = [(model, zero, n, gb) for (model, zero), row in TABLE.items() for n, gb in row.items()]


def total(memory: StateMemory) -> float:
    return memory.parameters + memory.gradients + memory.optimizer + memory.gathered


@pytest.mark.parametrize(("billions", "zero", "n", "printed"), ROWS)
def test_table_of_the_paper(billions: float, zero: int, n: int, printed: float) -> None:
    """The paper rounds, or (from 100 GB on) truncates."""
    ours = total(state_memory(billions * 1e9, zero, n, StatePolicy.zero_paper())) / 1e9
    digits = len(str(printed).partition(".")[2]) if isinstance(printed, float) else 0
    assert abs(ours - printed) <= (1.0 if printed >= 100 else 0.5 * 10**-digits + 1e-9)


def test_fsdp2_with_bf16() -> None:
    """4 bytes master, 4 gradient, 8 AdamW; 2 for the copy that computes, unsharded: all at once, or (ZeRO-3) by block."""
    policy = StatePolicy.of(Precision("bfloat16", "float32"), optimizer_named("adamw"))
    for zero, held in ((0, 16 + 2), (1, 16 / 8 + 2), (2, 16 / 8 + 2), (3, 16 / 8 + 2)):
        memory = state_memory(1000, zero, 8, policy)
        assert total(memory) == 1000 * held and memory.gathered_is_transient == (zero == 3)


def test_float32_copies_nothing_while_replicated() -> None:
    policy = StatePolicy.of(Precision(), optimizer_named("sgd"))
    assert total(state_memory(1000, 0, 8, policy)) == 8000
    assert state_memory(1000, 2, 8, policy).gathered == 4000
    assert state_memory(1000, 3, 1, policy).gathered == 0


def test_frozen_parameters_have_no_gradient_nor_moments() -> None:
    memory = state_memory(1000, 0, 1, StatePolicy.of(Precision(), optimizer_named("adamw")), trainable=0)
    assert memory.parameters == 4000 and memory.gradients == memory.optimizer == memory.reduced == 0


LINK = AxisLink(8, (Level("nv", 8, 1e9, 0.0),))


@pytest.mark.parametrize(("zero", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_wire_volume(zero: int, volume: int) -> None:
    """arXiv 1910.02054, section 7: 2, 2, 2 and 3 times the parameters (float32 here, so all of one width)."""
    device = Cluster.parse("dgx-h100").device
    cost = state_cost(Group(1e9, 1e9, 10), zero, LINK, device, Precision(), optimizer_named("adamw"))
    seconds = cost.gather_forward_seconds + cost.gather_backward_seconds + cost.reduce_seconds
    assert seconds == pytest.approx(volume * 4 * 7 / 8)


def test_optimizer_streams_its_shard() -> None:
    device, adamw = Cluster.parse("dgx-h100").device, optimizer_named("adamw")
    group = Group(1e9, 1e9, 10)
    whole = optimizer_seconds(group, 0, 8, device, Precision(), adamw)
    assert whole == pytest.approx(80e9 / (device.bandwidth_bytes_per_second * device.bandwidth_fraction))
    assert optimizer_seconds(group, 1, 8, device, Precision(), adamw) == pytest.approx(whole / 8)
    cpu = Cluster.parse("local").device
    assert optimizer_seconds(Group(8, 8, 10), 0, 1, cpu, Precision(), adamw) == pytest.approx(100 * cpu.launch_seconds)
