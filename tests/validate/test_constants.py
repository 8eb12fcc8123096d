"""Constants of software: how they are fitted, what they may be, and what our own are worth on the runs of others."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest
from support.oracles.published_rows import row, session, table

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import presets
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.hardware.stack_entries import DEFAULT_STACK, software_stacks, stack_for
from autopar.validate.constants import FEWEST, Fitter, Item, Tangent, largest, leave_one_source_out, loss, step_seconds
from autopar.validate.rows import Row

DEVICES = [Cluster.parse(name).device for name in presets() if name != "local"]


def runs(*names: str, **changes: object) -> list[Item]:
    rows = [row(name, **changes) for name in names]
    return [(each, session().setup(each)) for each in rows]


def test_known_constants_are_recovered() -> None:
    """Runs whose times are those of given constants; the pull towards usual figures is all that is left."""
    true = {"matmul": 0.55, "memory": 0.45, "attention": 0.5}
    names = ("lf-001", "lf-019", "lf-030", "lf-045", "lf-060", "lf-070")
    items = [(replace(each, step_seconds=step_seconds((each, setup), true)), setup) for each, setup in runs(*names)]
    found = Fitter(items).fit()
    assert found is not None
    off = [abs(step_seconds(item, found) / (item[0].step_seconds or 1.0) - 1) for item in items]
    assert max(off) < 0.02
    assert found == pytest.approx(true, rel=0.15)
    held = Fitter(items, given={"attention": 0.3}).fit()
    assert held is not None and held["attention"] == 0.3
    assert Fitter(items[:3]).fit() is None, "never three constants to three rows"


def test_every_source_weighs_the_same_in_a_fit() -> None:
    """Three runs of one source and one of another: the errors of the one count as much as the three together."""
    few = [Tangent("b", 1.0, 1.2, (0.0,))]
    many = [Tangent("a", 1.0, 1.0, (0.0,))] * 3
    assert loss([*many, *few], {"matmul": 0.62}) == pytest.approx(loss(few, {"matmul": 0.62}) / 2)


def test_no_fit_goes_above_what_kernels_reach() -> None:
    """Runs twice as fast as anything: every constant ends at its physical limit or below."""
    measured = runs("lf-001", "lf-019", "lf-045", "lf-070")
    items = [(replace(each, step_seconds=0.3 * (each.step_seconds or 1.0)), setup) for each, setup in measured]
    device = items[0][1].cluster.device
    found = Fitter(items).fit()
    assert largest("matmul", device) == pytest.approx(794.5 / 989)
    assert found is not None and all(value <= largest(name, device) for name, value in found.items())


def test_a_source_that_is_left_out_is_not_seen() -> None:
    """What is measured in a source does not change what is predicted for it, but what is predicted for the others."""
    names = ("lf-001", "lf-004", "lf-019", "lf-030", "lf-045", "lf-060", "lf-071", "lf-073", "lf-075")
    plain = [row(name) for name in names]
    chosen = plain[0].source

    def other(each: Row) -> Row:
        return replace(each, step_seconds=1.3 * (each.step_seconds or 0.0)) if each.source == chosen else each

    before, after = (leave_one_source_out(rows, session()) for rows in (plain, [other(each) for each in plain]))
    for one, two in zip(before, after, strict=True):
        assert one.evaluation is not None and two.evaluation is not None
        same = one.evaluation.step_seconds == pytest.approx(two.evaluation.step_seconds, rel=1e-9)
        assert same == (one.row.source == chosen)


def test_entries() -> None:
    """None is fitted to fewer than four rows, none above a limit, and each says how it came about."""
    for entry in software_stacks()[0]:
        assert entry.how
        if said := re.search(r"fitted on (\d+) rows", entry.how):
            assert int(said[1]) >= FEWEST
        devices = [device for device in DEVICES if device.generation == entry.generation and device.measured_peak]
        assert devices
        for name, value in entry.constants:
            assert value <= max(largest(name, device) for device in devices) + 5e-4, entry


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300", "gb200-nvl72"])
def test_plans_are_priced_with_our_own_constants(preset: str) -> None:
    device = Cluster.parse(f"{preset}:2").device
    own = stack_for(DEFAULT_STACK, device.generation)
    assert own is not None and not own.compiled
    assert dict(own.constants) == {
        "matmul": device.matmul_fraction,
        "memory": device.bandwidth_fraction,
        "attention": device.attention_fraction,
    }
    same = with_stack(Cluster.parse(f"{preset}:2"))
    assert same == Cluster.parse(f"{preset}:2")


def test_compiled_programs_have_constants_of_their_own() -> None:
    one = Cluster.parse("dgx-h100")
    eager, compiled = with_stack(one), with_stack(one, compiled=True)
    assert compiled.device.fused and compiled.device.matmul_fraction > eager.device.matmul_fraction
    assert with_stack(one, "fms-fsdp1", compiled=True).device == replace(with_stack(one, "fms-fsdp1").device, fused=True)


def test_products_lose_speed_beside_collectives_on_gpus() -> None:
    """arXiv 2507.03114: 10 to 20 % on average; a property of the device, whatever the software overlaps."""
    for name in presets():
        found = Cluster.parse(name).overlap.contention
        assert 0.1 <= found <= 0.2 if name != "local" else found == Overlap().contention
    mixed = Cluster.parse("dgx-a100:1+dgx-h100:1")
    assert mixed.overlap.contention == Cluster.parse("dgx-h100").overlap.contention
    assert with_stack(mixed, "nemo-megatron-core").overlap.contention == mixed.overlap.contention


def errors_of_fsdp2() -> list[float]:
    """Of the runs of FSDP2 as if our programs had made them."""
    runs = [each for each in table().values() if "fsdp2" in each.software_stack]
    rows = [replace(each, software_stack=DEFAULT_STACK) for each in runs]
    return [abs(each.error) for each in session().price(rows) if each.error is not None]


def test_own_constants_on_the_runs_of_fsdp2() -> None:
    """A median of at most 8 %."""
    errors = errors_of_fsdp2()
    assert len(errors) >= 14 and median(errors) <= 0.08
