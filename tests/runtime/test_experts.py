"""Mixtures of experts on one rank and on several, against a loop over copies of tokens in float64."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.rank_pool import RankPool
from support.oracles.experts_by_loop import GATES, Example, by_loop, example, limited_experts, random_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.device.offload import HostMemory
from autopar.runtime.ops.expert_activations import ExpertActivation
from autopar.runtime.ops.expert_load import gather_expert_load, recording_copies
from autopar.runtime.ops.experts import expert_capacity
from autopar.runtime.ops.mixtures import moe_experts
from autopar.runtime.step.recompute import Recompute

PARTITIONED = "aot_eager_decomp_partition"
"""AOTAutograd with the partition of inductor, and no kernels to compile."""
LAYOUTS = ["halves", "interleaved", "plain", "halves transposed", "interleaved transposed", "plain transposed"]


def run(function: Any, given: Example, **options: Any) -> Any:
    """The operator on an example."""
    return function(*given[:7], activation=given.activation, layout=given.layout, **options)


def check(given: Example, tolerance: float = 1e-12) -> None:
    """The operator is the loop, and so are its gradients."""
    one, two = given.leaves(), given.leaves()
    expected, found = by_loop(one), run(moe_experts, two)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(random_gradients(found, two), random_gradients(expected, one), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_layouts(layout: str, bias: bool) -> None:
    check(example(layout=layout, bias=bias, activation="relu2" if "plain" in layout else "silu", nowhere=True))


@pytest.mark.parametrize("activation", GATES)
def test_gates(activation: str) -> None:
    check(example(activation=activation, layout="interleaved"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_products(dtype: torch.dtype) -> None:
    """torch's grouped product, which takes rows of multiples of 16 bytes; an expert is empty, and another has all copies."""
    plain = example((32,), hidden=16, inner=24, bias=False, dtype=dtype)
    for experts in (plain.experts.where(plain.experts != 1, 3), torch.full_like(plain.experts, 2)):
        given = plain._replace(experts=experts).leaves()
        exact = Example(*(None if each is None else each.double() for each in given[:7]))._replace(experts=experts).leaves()
        found, expected = run(moe_experts, given), by_loop(exact)
        for mine, theirs in zip(
            (found, *random_gradients(found, given)), (expected, *random_gradients(expected, exact)), strict=True
        ):
            assert (mine.double() - theirs).norm() <= (1e-6 if dtype is torch.float32 else 2e-2) * theirs.norm()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 5))
    k, tokens = data.draw(st.integers(1, number)), data.draw(st.integers(1, 7))
    given = example((tokens,), number, k, bias=data.draw(st.booleans()), seed=data.draw(st.integers(0, 99)))
    ids = data.draw(st.lists(st.integers(0, number), min_size=tokens * k, max_size=tokens * k))  # number: nowhere
    check(given._replace(experts=torch.tensor(ids).view(tokens, k)), 1e-10)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_capacity_takes_the_first(data: st.DataObject) -> None:
    groups, tokens, number = (data.draw(st.integers(1, 4)) for _ in range(3))
    k, factor = data.draw(st.integers(1, number)), data.draw(st.sampled_from([0.3, 0.5, 1.0, 1.25, 4.0]))
    ids = data.draw(st.lists(st.integers(0, number), min_size=groups * tokens * k, max_size=groups * tokens * k))
    experts = torch.tensor(ids).view(groups, tokens, k)
    expected = limited_experts(experts, number, ceil(factor * tokens * k / number))
    assert expert_capacity(experts, number, factor).equal(expected)


def test_capacity_of_the_operator() -> None:
    given = example((2, 6), bias=False)
    limited = limited_experts(given.experts, 4, ceil(0.5 * 6 * 2 / 4))
    assert (limited == 4).any()
    assert run(moe_experts, given, capacity=0.5).equal(run(moe_experts, given._replace(experts=limited)))


@pytest.mark.parametrize("activation", ["softmax", "silu(2)", "silu_clamped", "swiglu", "swiglu_clamped(1)", ""])
def test_unknown_activation(activation: str) -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        ExpertActivation.of(activation, "halves")


@pytest.mark.parametrize("layout", ["thirds", "halves plain", "transposed transposed"])
def test_unknown_layout(layout: str) -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        ExpertActivation.of("silu", layout)


# -- over an axis


def cut(given: Example, size: int, rank: int, tokens: bool) -> Example:
    """What a rank has: its experts, and its tokens if they are cut."""
    mine = [None if each is None else each.chunk(size)[rank] for each in given[3:7]]
    if not tokens:
        return given._replace(up=mine[0], down=mine[1], up_bias=mine[2], down_bias=mine[3]).leaves()
    first = [each.chunk(size)[rank] for each in given[:3]]
    return Example(*first, *mine, *given[7:]).leaves()  # type: ignore[arg-type]


def on_rank(given: Example, form: str, world: int, mode: str = "") -> tuple[Tensor, list[Tensor], list[Any]]:
    """The result that a rank has (owned: their sum), its gradients, and the load."""
    axis = MeshHandle({"tp": world}).tp
    dispatched = form == "dispatched"
    mine = cut(given, axis.size, axis.coordinate, dispatched)
    function = C.moe_experts_dispatched if dispatched else C.moe_experts_owned
    with recording_copies() as recorded:
        if mode == "recompute":
            with Recompute(HostMemory(torch.device("cpu"))) as recompute:
                result = run(partial(recompute, function), mine, axis=axis)
                seen = result.sin()
        elif mode == "checkpoint":
            seen = torch.utils.checkpoint.checkpoint(
                lambda *args: run(function, Example(*args), axis=axis).sin(), *mine, use_reentrant=False
            )
            result = seen
        elif mode == "compiled":
            result = torch.compile(partial(run, function), backend=PARTITIONED, fullgraph=True)(mine, axis=axis)
            seen = result.sin()
        else:
            result = run(function, mine, axis=axis)
            seen = result.sin() if dispatched else C.convert(result, axis, "P -> I").sin()
    load = gather_expert_load(recorded, "cpu")
    weight = torch.arange(seen.numel(), dtype=seen.dtype).view(seen.shape) + (axis.coordinate * seen.numel() if dispatched else 0)
    found = torch.autograd.grad((seen * weight).sum(), mine.tensors)
    return seen.detach(), [each.detach() for each in found], load


def whole(given: Example) -> tuple[Tensor, list[Tensor]]:
    leaves = given.leaves()
    seen = by_loop(leaves).sin()
    weight = torch.arange(seen.numel(), dtype=seen.dtype).view(seen.shape)
    return seen.detach(), list(torch.autograd.grad((seen * weight).sum(), leaves.tensors))


ROUTES = ("random", "one expert", "first rank only", "nowhere")


def routed(route: str) -> Example:
    given = example((8, 3), number=4, k=2, nowhere=route == "nowhere")
    if route == "one expert":
        given = given._replace(experts=torch.full_like(given.experts, 3))
    if route == "first rank only":  # others send and receive nothing
        experts = torch.full_like(given.experts, 4)
        experts[0] = 0
        given = given._replace(experts=experts)
    return given


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_dispatched(ranks: RankPool, route: str, world: int) -> None:
    given = routed(route)
    expected, grads = whole(given)
    answers = ranks.run(on_rank, given, "dispatched", world, world=world)
    torch.testing.assert_close(torch.cat([seen for seen, _, _ in answers]), expected, rtol=1e-12, atol=1e-12)
    for index, grad in enumerate(grads):
        found = torch.cat([each[index] for _, each, _ in answers])
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-10)
    counts = torch.bincount(given.experts.flatten(), minlength=5)[:4].tolist()
    for *_, (load,) in answers:
        assert list(load.by_expert) == counts
        assert list(load.by_rank) == [sum(counts[rank * 4 // world : (rank + 1) * 4 // world]) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_owned(ranks: RankPool, route: str, world: int) -> None:
    given = routed(route)
    expected, grads = whole(given)
    answers = ranks.run(on_rank, given, "owned", world, world=world)
    for seen, _, _ in answers:
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)
    for index, grad in enumerate(grads):
        pieces = [each[index] for _, each, _ in answers]
        found = sum(pieces) if index < 2 else torch.cat(pieces)  # tokens and weights are whole everywhere: gradients are partial
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mode", "route"),
    [("recompute", "random"), ("checkpoint", "random"), ("compiled", "random"), ("compiled", "first rank only")],
)
def test_dispatched_in_other_modes(ranks: RankPool, mode: str, route: str) -> None:
    """Recomputed in the backward; and as operators of compiled code."""
    given = routed(route)
    expected, grads = whole(given)
    answers = ranks.run(on_rank, given, "dispatched", 2, mode, world=2)
    torch.testing.assert_close(torch.cat([seen for seen, _, _ in answers]), expected, rtol=1e-12, atol=1e-12)
    for index, grad in enumerate(grads):
        torch.testing.assert_close(torch.cat([each[index] for _, each, _ in answers]), grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("biases", [(True, True), (False, True), (True, False)])
def test_compiled(biases: tuple[bool, bool]) -> None:
    """In one graph, with capacity, with frozen matrices, and without gradients."""
    whole = example((2, 6))
    given = whole._replace(**{name: None for name, there in zip(("up_bias", "down_bias"), biases, strict=True) if not there})
    torch._dynamo.reset()
    compiled = torch.compile(partial(run, C.moe_experts), backend=PARTITIONED, fullgraph=True)
    for frozen, options in ((False, {}), (False, {"capacity": 0.5}), (True, {})):
        one, two = given.leaves(), given.leaves()
        if frozen:
            one, two = (each._replace(up=each.up.detach()) for each in (one, two))
        found, expected = compiled(two, **options), run(moe_experts, one, **options)
        torch.testing.assert_close(found, expected)
        trained = [[x for x in each.tensors if x.requires_grad] for each in (one, two)]
        gradients = [torch.autograd.grad(y.square().sum(), xs) for y, xs in zip((expected, found), trained, strict=True)]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(compiled(two, **options), expected)


def test_shapes_without_data() -> None:
    """A dry run: as if every expert had equally many copies."""
    with FakeTensorMode():
        given = example((4, 3)).leaves()
        result = run(moe_experts, given)
        assert result.shape == given.x.shape
        assert [each.shape for each in gradients_without_data(result, given)] == [each.shape for each in given.tensors]


def gradients_without_data(result: Tensor, given: Example) -> list[Tensor]:
    return list(torch.autograd.grad(result, given.tensors, torch.empty_like(result)))
