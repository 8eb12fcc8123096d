"""What a training on ranks and one on one process have apart: losses, gradients, and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from support.harness.training_loop import Training, loss_of

NOISE = 1e-3
"""A gradient smaller than this share of the largest gradient of all is noise (mathematically zero, such as a key bias's)."""


class Outcome(NamedTuple):
    """Loss and gradients of the first step; parameters and buffers after the last one."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def differences(found: Outcome, expected: Outcome, tolerance: float, parameters: bool = True) -> list[str]:
    """What differs by more than `tolerance`, relative to each tensor's largest value; a gradient counts relative to at least
    `NOISE` times the largest gradient."""
    out = different_numbers("loss", [found[0]], [expected[0]], tolerance)
    out += different_tensors("gradient", found[1], expected[1], tolerance, noise=NOISE)
    if parameters:
        buffers = {name: tensor for name, tensor in expected[3].items() if name in found[3]}
        out += different_tensors("parameter", found[2], expected[2], tolerance)
        out += different_tensors("buffer", found[3], buffers, tolerance)
    return out


def different_numbers(kind: str, found: Sequence[float], expected: Sequence[float], tolerance: float) -> list[str]:
    """Those that differ by more than `tolerance`, relative to what is expected."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [f"{kind} {index}: {mine} instead of {theirs}" for index, (mine, theirs) in pairs
            if not abs(mine - theirs) <= tolerance * abs(theirs)]  # fmt: skip


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def different_tensors(
    kind: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: float = 0.0,
    smallest: float = 1e-12,
) -> list[str]:
    """Names on one side only, or tensors that differ by more than `tolerance` relative to their largest value, but at least to
    `noise` times the largest value of all tensors and to `smallest`."""
    if found.keys() != expected.keys():
        return [f"{kind}s of {sorted(found.keys() ^ expected.keys())} on one side only"]
    largest = {name: float(_wide(tensor).abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    floor = max(noise * max(largest.values(), default=0.0), smallest)
    out = []
    for name, tensor in expected.items():
        error = float((_wide(found[name]) - _wide(tensor)).abs().max()) if tensor.numel() else 0.0
        if not error <= tolerance * max(largest[name], floor):
            out.append(f"{kind} {name} off by {error / max(largest[name], floor):.2g}")
    return out


def training_differences(found: Training, expected: Training, tolerance: float = 1e-9) -> list[str]:
    """What differs of two trainings by more than `tolerance`, relative to each tensor's largest value; a state on one side may
    lack what training does not need."""
    both = found.state.keys() & expected.state.keys()
    return [
        *different_numbers("loss", found.losses, expected.losses, tolerance),
        *different_tensors("gradient", found.gradients, expected.gradients, tolerance, smallest=1e-9),
        *different_tensors("state", *({name: each.state[name] for name in both} for each in (found, expected)), tolerance,
                           smallest=1e-9),
    ]  # fmt: skip


def step_alike(
    models: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], *inputs: Tensor, tolerance: float = 1e-9, **more: Any
) -> None:
    """A training step of a parallel model and of the plain one. AssertionError where their losses differ by more than
    `tolerance`, or, but for losses in float32, their gradients."""
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        result = model(*inputs, **more)
        loss = result[-1] if isinstance(result, tuple) else loss_of(result)
        loss.backward()
        losses.append(loss.item())
    assert not (wrong := different_numbers("loss", losses[:1], losses[1:], tolerance)), wrong
    for optimizer in optimizers:
        optimizer.step()
    if tolerance < 1e-8:
        same_gradients(*models)


def same_gradients(parallel: Any, plain: nn.Module) -> None:
    """AssertionError where a gradient differs. All ranks must call; gradients of both are dropped."""
    found = parallel.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in found or not found[name].any(), name
        else:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)
    parallel.zero_grad()
    plain.zero_grad()


def same_state(parallel: Any, plain: nn.Module, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """AssertionError where a parameter or buffer differs. All ranks must call."""
    found = parallel.full_state()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)


def same_report(found: Any, expected: Any, floor: float = 1e-8, where: str = "") -> None:
    """AssertionError where what two scripts report differs: numbers by more than 1e-5; sums of weights and moments by more than
    1e-4, since Adam's first steps enlarge the rounding of tiny gradients."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            same_report(found[key], expected[key], floor, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, each in enumerate(expected):
            same_report(found[index], each, floor, f"{where}[{index}]")
    elif expected is None or isinstance(expected, str):
        assert found == expected, where
    else:
        bound = max(floor, (1e-4 if where.startswith((".weights", ".moments")) else 1e-5) * abs(expected))
        assert abs(found - expected) <= bound, (where, found, expected)
