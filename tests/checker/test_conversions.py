"""Every conversion that the checker takes for right makes of shards those that it says, of values and of gradients, also where
two axes cut one dimension; on ranks in lockstep, with the runtime's own operations."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import sympy
import torch
from checker.lockstep import LockstepAxis, OnRanks, convert
from torch import Tensor

from autopar.checker import conversions
from autopar.checker.conversions import COMMUNICATION
from autopar.checker.shards import MICRO, Axes, Cut, Kind, Kinds
from autopar.runtime.comm.conversions import COMMUNICATING, parse_conversion

SIZES = (2, 4)
RANKS = list(product(*map(range, SIZES)))
AXES = Axes(("dp", "tp"), SIZES)
SHAPE = (16, 24)
NUMBER = {at: index for index, at in enumerate(RANKS)}
GROUPS = {
    "dp": tuple(tuple(NUMBER[i, j] for i in range(2)) for j in range(4)),
    "tp": tuple(tuple(NUMBER[i, j] for j in range(4)) for i in range(2)),
}
PLACES = ("R", "I", "P", *(f"S({dim},{parts})" if parts > 1 else f"S({dim})" for dim in (0, 1) for parts in (1, 2, 3, 4)))


def held(x: Tensor, kinds: Kinds, gradient: bool = False) -> list[Tensor]:
    """What every rank has; from the definition of a cut, and of summands (at random)."""
    generator = torch.Generator().manual_seed(0)
    index = torch.ones(len(RANKS), *x.shape, dtype=torch.bool)
    parts = [x.clone() for _ in RANKS]
    for axis, (kind, size) in enumerate(zip(kinds, SIZES, strict=True)):
        if isinstance(kind, Cut):
            digit = (torch.arange(x.shape[kind.dim]) // kind.inner) % size
            view = digit.view([-1 if d == kind.dim else 1 for d in range(x.dim())])
            for number, at in enumerate(RANKS):
                index[number] &= view == at[axis]
    for axis, (kind, size) in enumerate(zip(kinds, SIZES, strict=True)):
        if kind == ("R" if gradient else "P"):
            noise = {}
            for at in RANKS:
                others = (*at[:axis], 0, *at[axis + 1 :])
                first = noise.setdefault(others, torch.randn(size, *x.shape, generator=generator, dtype=x.dtype))
                value = parts[NUMBER[at]]
                rest = first[at[axis]] if at[axis] else -first[1:].sum(0)
                parts[NUMBER[at]] = (value if at[axis] == 0 else torch.zeros_like(value)) + rest
    shape = AXES.local_shape(tuple(x.shape), kinds)
    assert shape is not None
    return [part[mask].view(shape) for part, mask in zip(parts, index, strict=True)]


def whole(parts: list[Tensor], kinds: Kinds, gradient: bool = False) -> Tensor:
    """The tensor that the ranks hold together; copies must be equal."""
    out = torch.zeros(SHAPE, dtype=parts[0].dtype)
    summed = [kind == ("R" if gradient else "P") for kind in kinds]
    copies = [not isinstance(kind, Cut) and not total for kind, total in zip(kinds, summed, strict=True)]
    for chosen in product(*(range(size) if copy else [0] for size, copy in zip(SIZES, copies, strict=True))):
        total = torch.zeros(SHAPE, dtype=parts[0].dtype)
        for at in RANKS:
            if any(copy and at[i] != chosen[i] for i, copy in enumerate(copies)):
                continue
            mask = torch.ones(SHAPE, dtype=torch.bool)
            for axis, (kind, size) in enumerate(zip(kinds, SIZES, strict=True)):
                if isinstance(kind, Cut):
                    digit = (torch.arange(SHAPE[kind.dim]) // kind.inner) % size
                    mask &= digit.view([-1 if d == kind.dim else 1 for d in range(2)]) == at[axis]
            total[mask] += parts[NUMBER[at]].reshape(-1)
        if any(chosen):
            torch.testing.assert_close(total, out, rtol=1e-9, atol=1e-9)
        out = total
    return out


def kinds(random: Random) -> Kinds:
    choices: list[Kind] = ["R", "I", "P"]
    while True:
        found = tuple(
            random.choice([*choices, Cut(dim, SHAPE[dim] // size // random.choice((1, 2, 3, 4)))])
            for size, dim in ((2, random.randrange(2)), (4, random.randrange(2)))
        )
        if all(not isinstance(k, Cut) or k.inner for k in found) and AXES.local_shape(SHAPE, found) is not None:
            return found


@pytest.mark.parametrize("seed", range(8))
def test_conversions(seed: int) -> None:
    random, done, pairs = Random(seed), 0, set[tuple[str, str]]()
    generator = torch.Generator().manual_seed(seed)
    while done < 40:
        before, axis = kinds(random), random.choice(("dp", "tp"))
        text = f"{random.choice(PLACES)} -> {random.choice(PLACES)}"
        try:
            after = conversions.convert(AXES, SHAPE, before, axis, text, True)
        except conversions.NoConversion:
            continue
        if AXES.local_shape(SHAPE, after) is None:
            continue
        x, seeds = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
        leaves = [each.clone().requires_grad_() for each in held(x, before)]
        handle = LockstepAxis(axis, dict(zip(AXES.names, SIZES, strict=True))[axis], GROUPS[axis])
        result = convert(OnRanks(leaves), handle, text).parts
        torch.testing.assert_close(whole([each.detach() for each in result], after), x, rtol=1e-9, atol=1e-9)
        torch.autograd.backward(result, held(seeds, after, gradient=True))
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
        torch.testing.assert_close(whole(gradients, before, gradient=True), seeds, rtol=1e-9, atol=1e-9)
        pairs.add((str(before[AXES.names.index(axis)])[0], text))
        done += 1
    assert len(pairs) > 10


# -- by algebra: each rank's numbers are symbols, of a dimension of one element for each rank

Ranks = list[list[sympy.Expr]]
DUAL = {"S": "S", "R": "P", "P": "R", "I": "I"}


def state(kind: str, ranks: int, name: str) -> Ranks:
    """What ranks hold of a tensor of a kind, as generally as it can be."""
    if kind == "P":
        return [list(sympy.symbols(f"{name}{r}_:{ranks}")) for r in range(ranks)]
    whole = list(sympy.symbols(f"{name}_:{ranks}"))
    return [[whole[r]] if kind == "S" else list(whole) for r in range(ranks)]


def value(kind: str, held: Ranks) -> list[sympy.Expr]:
    """The tensor that ranks hold together; AssertionError where they do not hold one of this kind."""
    if kind == "S":
        assert all(len(each) == 1 for each in held)
        return [x for each in held for x in each]
    if kind == "P":
        return [sympy.expand(sum(column)) for column in zip(*held, strict=True)]
    assert all(each == held[0] for each in held)
    return held[0]


def moved(held: Ranks, operation: str) -> Ranks:
    """A collective or a local operation of the table in `runtime/comm/conversions.py`."""
    ranks = len(held)
    total = [sympy.expand(sum(column)) for column in zip(*held, strict=True)]
    match operation:
        case "gather":
            return [[x for each in held for x in each]] * ranks
        case "all_reduce":
            return [total] * ranks
        case "reduce_scatter":
            return [[total[r]] for r in range(ranks)]
        case "slice":
            return [[held[r][r]] for r in range(ranks)]
        case "pad":
            return [[held[r][0] if i == r else sympy.Integer(0) for i in range(ranks)] for r in range(ranks)]
        case "mask":
            return [held[0], *[[sympy.Integer(0)] * ranks] * (ranks - 1)]
        case "scale":
            return [[x / ranks for x in each] for each in held]
    return held


@pytest.mark.parametrize("pair", sorted(pair for pair in COMMUNICATION if pair != "SS"))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_conversion_keeps_the_tensor_and_its_gradient(pair: str, ranks: int) -> None:
    """The forward and the backward of each pair keep the tensor, and the gradient of the dual kind, for all numbers."""
    texts = [letter.replace("S", "S(0)") for letter in pair]
    forward, backward = (each.kind for each in parse_conversion(" -> ".join(texts)))
    assert COMMUNICATION[pair] == tuple(each if each in COMMUNICATING else "" for each in (forward, backward))
    source, target = pair
    x = state(source, ranks, "x")
    assert value(target, moved(x, forward)) == value(source, x)
    gradient = state(DUAL[target], ranks, "g")
    back = value(DUAL[source], moved(gradient, backward))
    assert [sympy.expand(x) for x in back] == value(DUAL[target], gradient)


def test_shares_of_micro_batches() -> None:
    """A floating-point tensor that all micro-batches have alike, divided by their number, is a summand in each."""
    axes = Axes(("dp", MICRO), (2, 4))
    assert conversions.share(axes, ("P", "R"), 4, torch.float64) == ("P", "P")
    for kinds, count, dtype in ((("R", "P"), 4, torch.float64), (("R", "R"), 2, torch.float64), (("R", "R"), 4, torch.int64)):
        with pytest.raises(conversions.NoConversion):
            conversions.share(axes, kinds, count, dtype)
    with pytest.raises(conversions.NoConversion):
        conversions.share(AXES, ("R", "R"), 4, torch.float64)
