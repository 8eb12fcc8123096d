"""ZeRO's memory against the paper's table, its wire volume, and that of FSDP2."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import log10
from pathlib import Path

import pytest

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.state.optimizers import optimizer_named, optimizer_seconds
from autopar.cost_models.state.state_cost import accumulate_seconds, state_cost
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StateMemory, StatePolicy, state_memory
from autopar.cost_models.step.memory_events import update_temporaries
from autopar.ir.plan import Precision

DATA = Path(__file__).parents[2] / "data" / "zero_memory.csv"


def rows(table: str, kind: str = "") -> list[dict[str, str]]:
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    found = [row for row in csv.DictReader(lines) if row["table"] == table and kind in row["kind"]]
    assert found
    return found


def rounded(printed: str, ours: float) -> bool:
    """The paper rounds, or (from 100 GB on) truncates."""
    digits = len(printed.partition(".")[2])
    return abs(ours - float(printed)) <= (1.0 if float(printed) >= 100 else 0.5 * 10**-digits + 1e-9)


def group(elements: float) -> StateGroup:
    return StateGroup(elements, elements, 2)


ZERO_PAPER = StatePolicy(2, 4, 2, 8, stored_compute=True)
"""fp16 weights 2, fp16 gradients 2, K = 12 (float32 master 4, momentum 4, variance 4): arXiv 1910.02054, section 3.1."""


def total(memory: StateMemory) -> float:
    return memory.parameters + memory.gradients + memory.optimizer + memory.gathered


def paper_bytes(parameters: float, row: dict[str, str]) -> float:
    """Model state on one device, of a model that is sharded over `mp_degree` devices first."""
    own = parameters / int(row["mp_degree"])
    return total(state_memory(group(own), int(row["zero_stage"]), int(row["dp_degree"]), ZERO_PAPER))


@pytest.mark.parametrize("table", ["Table 1", "Figure 1"])
def test_memory_of_the_paper(table: str) -> None:
    """Every entry: the formula's value to its last digit, and what the paper prints."""
    for row in rows(table):
        ours = paper_bytes(float(row["params_b"]) * 1e9, row) / 1e9
        assert abs(ours - float(row["formula_value"])) <= 0.0005 + 1e-9, row
        assert rounded(row["published_value"], ours), row
    assert len(rows("Table 1")) == 54 and len(rows("Figure 1")) == 4


def test_largest_models_of_the_paper() -> None:
    """Table 2: what fits 32 GB. Rows of several model-parallel devices are multiples of the rounded first one; ZeRO-3's are
    printed in trillions, rounded down. What was measured is less, since activations need memory as well."""
    for row in rows("Table 2"):
        mp, printed = int(row["mp_degree"]), float(row["published_value"])
        ours = 32e9 / paper_bytes(1.0, row) / 1e9
        if "measured" in row["kind"]:
            assert printed < ours, row
        elif row["notes"]:
            unit = 10 ** int(log10(ours))
            assert printed == ours // unit * unit, row
        else:
            assert round(ours / mp, 1) * mp == pytest.approx(printed), row


def test_fsdp2_with_bf16() -> None:
    """4 bytes master weight, 4 gradient, 8 AdamW; 2 for the unsharded compute copy: of all blocks, or (ZeRO-3) block by block."""
    policy = StatePolicy.of(Precision("bfloat16", "float32"), optimizer_named("adamw"))
    for zero, held in ((0, 16 + 2), (1, 16 / 8 + 2), (2, 16 / 8 + 2), (3, 16 / 8 + 2)):
        memory = state_memory(group(1000), zero, 8, policy)
        assert total(memory) == 1000 * held and memory.gathered_is_transient == (zero == 3)


def test_float32_copies_nothing_while_replicated() -> None:
    policy = StatePolicy.of(Precision(), optimizer_named("sgd"))
    assert total(state_memory(group(1000), 0, 8, policy)) == 8000
    assert state_memory(group(1000), 2, 8, policy).gathered == 4000
    assert state_memory(group(1000), 3, 1, policy).gathered == 0


def test_frozen_parameters_have_no_gradient_nor_optimizer_state() -> None:
    memory = state_memory(StateGroup(1000, 0, 2), 0, 1, StatePolicy.of(Precision(), optimizer_named("adamw")))
    assert (
        memory.parameters == 4000
        and memory.gradients == memory.optimizer == memory.unsharded_gradients == memory.reduce_buffer == 0
    )


def test_two_groups_of_a_call_have_one_largest_tensor() -> None:
    """An optimizer that updates one parameter after the other has temporaries of the largest of both groups, as of several
    chunks; all else is there at the same time."""
    policy = StatePolicy.of(Precision(), optimizer_named("adamw"))
    own, experts = (state_memory(StateGroup(n, n, 2, largest=n / 2), 0, 1, policy) for n in (1000, 3000))
    both = own + experts
    assert both.largest_tensor == experts.largest_tensor == StateMemory.merged([own, experts]).largest_tensor == 6000
    assert both.parameters == 16000 and both.update_temporaries == own.update_temporaries + experts.update_temporaries
    assert update_temporaries([both], foreach=False) == 2 * experts.largest_tensor


LINK = AxisLink(8, (Level(Link("nv", 8, 1e9, 0.0), 8),))


@pytest.mark.parametrize("row", rows("section 7"), ids=lambda row: f"zero{row['zero_stage']}")
def test_wire_volume(row: dict[str, str]) -> None:
    """2, 2, 2 and 3 times the parameters (float32 here, so all of one width)."""
    device = Cluster.parse("dgx-h100").device
    cost = state_cost(StateGroup(1e9, 1e9, 10), int(row["zero_stage"]), LINK, device, Precision(), optimizer_named("adamw"))
    seconds = cost.gather_forward_seconds + cost.gather_backward_seconds + cost.reduce_seconds
    assert seconds == pytest.approx(int(row["published_value"].partition(" ")[0]) * 4 * 7 / 8)


def test_the_reduce_dtype_is_on_the_wire_and_in_the_buffer() -> None:
    """Gradients stay in the master's dtype; unreduced ones (ZeRO-1 between micro-batches) wait in the reduce dtype (FSDP2)."""
    device, adamw = Cluster.parse("dgx-h100").device, optimizer_named("adamw")
    for zero in range(4):
        one, other = (
            state_cost(StateGroup(1e9, 1e9, 10), zero, LINK, device, Precision(compute, "float32", reduce=compute), adamw)
            for compute in ("bfloat16", "float16")
        )
        whole = state_cost(StateGroup(1e9, 1e9, 10), zero, LINK, device, Precision("bfloat16", "float32"), adamw)
        assert one == other, "16 bits are 16 bits"
        assert one.reduce_bytes * 2 == whole.reduce_bytes and one.reduce_seconds == pytest.approx(whole.reduce_seconds / 2)
        assert one.gather_forward_seconds == whole.gather_forward_seconds
        assert one.memory.gradients == whole.memory.gradients and one.memory.parameters == whole.memory.parameters
        assert one.memory.reduce_buffer * 2 == whole.memory.reduce_buffer > 0
        assert one.memory.accumulated == whole.memory.accumulated / (2 if zero == 1 else 1)
        seconds = [accumulate_seconds(each, zero, 8, device, Precision("bfloat16", "float32", reduce=reduce))
                   for each, reduce in ((whole, ""), (one, "bfloat16"))]  # fmt: skip
        assert seconds[1] == pytest.approx(seconds[0] * (6 / 10 if zero == 1 else 1))


def test_optimizer_streams_its_shard() -> None:
    device, adamw = Cluster.parse("dgx-h100").device, optimizer_named("adamw")
    group = StateGroup(1e9, 1e9, 10)
    whole = optimizer_seconds(group, 0, 8, device, Precision(), adamw)
    assert whole == pytest.approx(80e9 / (device.bandwidth_bytes_per_second * device.bandwidth_fraction))
    assert optimizer_seconds(group, 1, 8, device, Precision(), adamw) == pytest.approx(whole / 8)
    cpu = Cluster.parse("local").device
    assert optimizer_seconds(StateGroup(8, 8, 10), 0, 1, cpu, Precision(), adamw) == pytest.approx(
        100 * cpu.launch_seconds + 640 / (cpu.bandwidth_bytes_per_second * cpu.bandwidth_fraction)
    )
    slow = replace(cpu, update_bytes_per_second=1e9)
    assert optimizer_seconds(StateGroup(8, 8, 10), 0, 1, slow, Precision(), adamw) == pytest.approx(
        100 * cpu.launch_seconds + 640 / 1e9
    )


def test_copies_around_the_collectives_of_state_where_they_were_measured() -> None:
    """FSDP2's gathers and reductions have factors of their own; the all-reduce of replicated gradients has not."""
    plain = Link("loopback", 4, 1e9, 1e-3, factors=(("all_gather", 2.0, 2.0), ("reduce_scatter", 1.0, 1.0)))
    measured = replace(plain, factors=(*plain.factors, ("parameter_gather", 4.0, 6.0), ("gradient_scatter", 3.0, 3.0)))
    device, group = Cluster.parse("local:4").device, StateGroup(2.0**22, 2.0**22, 1)

    def cost(link: Link, zero: int) -> tuple[float, float]:
        data = AxisLink(4, (Level(link, 4),), 0.0, ("ring",))
        found = state_cost(group, zero, data, device, Precision("float32", "float32"), optimizer_named("adamw"))
        return found.gather_forward_seconds, found.reduce_seconds

    ring = 3 / 4 * 2.0**24 / 1e9
    assert cost(plain, 3) == pytest.approx((2 * (3e-3 + ring), 3e-3 + ring))
    assert cost(measured, 3) == pytest.approx((4 * 3e-3 + 6 * ring, 3 * (3e-3 + ring)))
    assert cost(measured, 0) == cost(plain, 0)
