"""Formulas: the plain function against sympy's, the fast code against the formulas; planning makes no sympy expression."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.judges.sympy_formulas import expression_of, sympy_function

from autopar.cost_models.compute import kernels
from autopar.cost_models.compute.operations import profile, seconds_and_flops
from autopar.cost_models.formulas.formula import Formula
from autopar.cost_models.formulas.registry import FORMULAS, formula
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named, optimizer_seconds
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StatePolicy, state_memory
from autopar.ir.graph import Node, Ref, Value
from autopar.ir.placement import Invariant
from autopar.ir.plan import NodePlan, Precision
from autopar.operations.attention import attention_flops

NAMES = tuple(FORMULAS)
H100 = Cluster.parse("dgx-h100").device
SIZES = st.integers(1, 20000)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_expression(name: str) -> None:
    """Every parameter is explained and there is no other symbol; most are used (a description of levels may have more)."""
    found = formula(name)
    symbols = {str(symbol) for symbol in expression_of(found).free_symbols}
    assert symbols <= set(found.names) and len(set(found.names)) == len(found.names)
    assert found.source and found.unit and all(meaning for _, meaning in found.parameters)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_the_plain_function_is_sympys(name: str, random: object) -> None:
    found = formula(name)
    values = {each: random.choice((1, 2, 3.5, 8, 1e-6, 1e9)) for each in found.names}  # type: ignore[attr-defined]
    expected = sympy_function(found)(*(values[each] for each in found.names))
    assert found.value(values) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@settings(deadline=None)
@given(st.integers(1, 64), SIZES, SIZES, SIZES, st.sampled_from((0, 80, 108, 132, 304)))
def test_products(count: int, m: int, n: int, k: int, multiprocessors: int) -> None:
    """The best tile, whose last wave may not be full, and its seconds."""

    def efficiency(rows: int, columns: int, share: float) -> float:
        waves = ceil(count * ceil(m / rows) * ceil(n / columns) / multiprocessors)
        return share * count * m * n / (waves * multiprocessors * rows * columns) * k / (k + kernels._INNER)

    shape = {"count": count, "m": m, "n": n, "k": k}
    best = max(efficiency(*tile) for tile in kernels._TILES) if multiprocessors else 1.0
    assert kernels.product_efficiency(count, m, n, k, multiprocessors) == pytest.approx(best, rel=1e-9) and best <= 1.0
    device = replace(H100, multiprocessors=multiprocessors)
    rate = {"peak": device.peak_flops_per_second("bfloat16"), "fraction": device.matmul_fraction, "efficiency": best}
    seconds = kernels.product_seconds(device, "bfloat16", count, m, n, k)
    assert seconds == pytest.approx(formula("compute.product").value({**shape, **rate}), rel=1e-9)


@settings(deadline=None)
@given(SIZES, st.integers(8, 512), st.booleans(), st.floats(1e6, 1e15), st.booleans(), st.booleans())
def test_attention(queries: int, head: int, backward: bool, flops: float, gpu: bool, whole: bool) -> None:
    a, c = kernels._HEAD, kernels._WHOLE_SEQUENCE if whole else kernels._SEQUENCE
    efficiency = head / (head + a) * (128 + a) / 128 * queries / (queries + c)
    both = kernels.ATTENTION_BACKWARD if backward else 1.0
    assert kernels.attention_efficiency(queries, head, backward, whole) == pytest.approx(efficiency * both, rel=1e-9)
    device = replace(H100, multiprocessors=132 if gpu else 0)
    rate = {"peak": device.peak_flops_per_second("float16"), "fraction": device.attention_fraction}
    values = {"flops": flops, **rate, "efficiency": efficiency if gpu else 1.0, "pass_share": both if gpu else 1.0}
    seconds = kernels.attention_seconds(device, "float16", flops, queries, head, backward, whole)
    assert seconds == pytest.approx(formula("compute.attention").value(values), rel=1e-9)


@settings(deadline=None)
@given(*(st.integers(1, 300) for _ in range(6)), st.booleans())
def test_attention_flops(b: int, h: int, s: int, t: int, d: int, e: int, causal: bool) -> None:
    node = Node("aten.scaled_dot_product_attention", (), (("is_causal", causal),), ())
    ours = attention_flops(node, [(b, h, s, d), (b, h, t, d), (b, h, t, e)], [(b, h, s, e)])
    assert ours == (0.5 if causal else 1) * 2 * b * h * s * t * (d + e)  # arXiv 2307.08691, section 4.1: two products


@settings(deadline=None)
@given(st.floats(1, 1e13))
def test_streams(traffic: float) -> None:
    expected = traffic / (H100.bandwidth_bytes_per_second * H100.bandwidth_fraction)
    assert kernels.streaming_seconds(H100, traffic) == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(st.floats(0, 10), st.floats(0, 1e12), st.integers(0, 3), st.sampled_from(("dgx-h100", "local")))
def test_operations(arithmetic: float, traffic: float, count: int, preset: str) -> None:
    """A roofline over a floor; on a CPU, which waits for each kernel, a sum."""
    device = Cluster.parse(preset).device
    memory = {
        "bandwidth": device.bandwidth_bytes_per_second,
        "streams": device.bandwidth_fraction,
        "launch": device.launch_seconds,
    }
    known = {"arithmetic": arithmetic, "traffic": traffic, "kernels": count, **memory, "elements": 0, "special": 0}
    ours = kernels.operation_seconds(device, arithmetic, kernels.streaming_seconds(device, traffic), count)
    name = "compute.operation.cpu" if device.kind == "cpu" else "compute.operation"
    assert ours == pytest.approx(formula(name).value(known), rel=1e-9)


def test_transcendental_functions_of_a_cpu() -> None:
    """GELU of 1000 elements at a nanosecond each, and two in the backward, besides what an addition of equal traffic takes."""
    value = Value("x", (10, 100), "float32", True)
    node = Node("aten.gelu", (Ref("x"),), (), (Value("y", (10, 100), "float32", True),))
    known, plan = profile(node, {"x": value}, 1), NodePlan("y", ((Invariant(),),), ((Invariant(),),), ("redundant",))
    plain = Cluster.parse("local").device
    slow = replace(plain, transcendental_seconds=1e-9)
    before, after = (seconds_and_flops(known, plan, (1,), device) for device in (plain, slow))
    assert after[0] - before[0] == pytest.approx(1e-6) and after[1] - before[1] == pytest.approx(2e-6)


POLICIES = (
    StatePolicy(2, 4, 2, 8, stored_compute=True),  # the ZeRO paper's
    *(StatePolicy.of(Precision("bfloat16", "float32"), optimizer_named(n)) for n in ("adamw", "sgd")),
)


@settings(deadline=None)
@given(st.integers(0, 3), st.sampled_from(POLICIES), st.floats(1, 1e12), st.integers(1, 4096))
def test_state_bytes(stage: int, policy: StatePolicy, elements: float, shards: int) -> None:
    """Rajbhandari et al., arXiv 1910.02054, section 3 and table 1; without a stored compute copy as FSDP2 has it, where ZeRO-1
    shards gradients between backward and step."""
    memory = state_memory(StateGroup(elements, elements, 2), stage, shards, policy)
    compute, gradient = policy.compute_bytes, policy.gradient_bytes
    master, optimizer, n = policy.master_bytes, policy.optimizer_bytes, shards
    if policy.stored_compute:
        sharded = (0, master + optimizer, gradient + master + optimizer, compute + gradient + master + optimizer)[stage]
        expected = elements * (compute + gradient + master + optimizer - sharded + sharded / n)
    else:
        expected = elements * (master + gradient + optimizer) / (n if stage else 1)
    assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(st.integers(0, 3), st.floats(1, 1e12), st.integers(1, 500), st.integers(1, 64), st.sampled_from(("dgx-h100", "local")))
def test_optimizer(stage: int, elements: float, tensors: int, shards: int, preset: str) -> None:
    """torch.optim's foreach implementation: each pass reads and writes memory once; on a CPU each tensor has kernels of its
    own."""
    device, optimizer = Cluster.parse(preset).device, optimizer_named("adamw")
    accesses, bandwidth = optimizer.memory_accesses, device.bandwidth_bytes_per_second * device.bandwidth_fraction
    expected = elements * accesses * 4 / ((shards if stage else 1) * bandwidth)
    expected += (tensors if device.kind == "cpu" else 0) * accesses / 2 * device.launch_seconds
    ours = optimizer_seconds(
        StateGroup(elements, elements, tensors), stage, shards, device, Precision("bfloat16", "float32"), optimizer
    )
    assert ours == pytest.approx(expected, rel=1e-9)


def test_explained_with_and_without_numbers() -> None:
    found = Formula("area", "a*b", (("a", "metres"), ("b", "metres")), "Euclid", "square metres")
    assert found.explain().splitlines() == ["area = a*b   [square metres; Euclid]", "  a: metres", "  b: metres"]
    assert found.explain({"a": 2, "b": 3}).splitlines()[-1] == "  = 2*3 = 6 square metres"
    with pytest.raises(KeyError):
        found.value({"a": 2})


@pytest.mark.parametrize("name", NAMES)
def test_every_formula_is_explained(name: str) -> None:
    found = formula(name)
    without, numbers = found.explain(), found.explain(dict.fromkeys(found.names, 2.0))
    assert numbers.startswith(without) and all(f"  {each}: " in without for each in found.names)
    assert numbers.endswith(f"= {found.value(dict.fromkeys(found.names, 2.0)):.6g} {found.unit}")


def test_an_unknown_name_lists_its_neighbours() -> None:
    with pytest.raises(KeyError, match="all_gather.ring.1"):
        formula("all_gather.gossip.1")


def test_prices_cost_no_sympy() -> None:
    """Collectives, kernels and the schedule are priced without an expression: sympy might as well not be there."""
    code = """
import sympy
sympy.lambdify = sympy.sympify = sympy.Symbol = sympy.Max = None
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.compute import kernels
from autopar.cost_models.formulas.registry import FORMULAS
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
assert collective_seconds("all_reduce", 1e9, AxisLink(8, (Level(Link("a", 8, 1e9, 1e-6), 8),), 1e-6)) > 0
assert all(each.value(dict.fromkeys(each.names, 2.0)) > -9 for each in FORMULAS.values())
assert kernels.product_seconds(Cluster.parse("dgx-h100").device, "bfloat16", 1, 512, 512, 512) > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_derivative_of_a_price() -> None:
    """What the expressions are for beside printing: by how much a second more bandwidth helps."""
    import sympy

    found = expression_of(formula("all_gather.ring.1"))
    size, rate, width = (sympy.Symbol(name, positive=True) for name in ("N", "b1", "w1"))
    assert sympy.simplify(sympy.diff(found, rate) + (1 - 1 / width) * size / rate**2) == 0
