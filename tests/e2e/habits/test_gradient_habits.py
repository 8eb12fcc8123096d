"""Habits around gradients: frozen parameters, hooks, clipping, accumulation (docs/habits.md), on real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers, training_differences
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.harness.training_loop import adamw, full_gradients, train
from support.models.habit_model import batch, net
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar


@of("frozen 0")
def frozen_before(plan: str) -> None:
    models = [net(), net()]
    for model in models:
        model.layers[0].requires_grad_(False)
    equals_one_process(parallel_of(models[0], plan), models[1])


def frozen_later(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()

    def freeze(model: nn.Module) -> Callable[[int], None]:
        """A layer, then the tied weights by their second name, which several stages of a pipeline have."""

        def after_step(index: int) -> None:
            if index < 2:
                (model.layers[0], model.head)[index].requires_grad_(False)

        return after_step

    batches = [batch(seed) for seed in range(3)]
    found = train(parallel, batches, adamw(), after_step=freeze(parallel))
    expected = train(reference, batches, adamw(), after_step=freeze(reference))
    state = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=state), expected)), wrong[:3]


def freeze_all(plan: str) -> None:
    parallel, gradients = parallel_of(net(), plan), []
    for model in (parallel, net()):
        for parameter in model.parameters():
            parameter.requires_grad = False
        loss = model(**batch())
        assert not loss.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
        if parallel.program.mesh.pp.size == 1:
            x = batch()["x"].requires_grad_()
            model(**batch() | {"x": x}).backward()
            gradients.append(x.grad)
    if gradients:
        torch.testing.assert_close(*gradients)


def frozen_later_on_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    one_step(parallel)
    model.words.requires_grad_(False)
    return refusal(lambda: parallel(**batch()))


@of("frozen 0 1")
def unfrozen_later(plan: str) -> None:
    """Layer after layer, as a script that fine-tunes does; then one is frozen again."""
    models = [net(), net()]
    for model in models:
        model.layers.requires_grad_(False)
    parallel, reference = parallel_of(models[0], plan), models[1]
    weight = dict(parallel.named_parameters())["layers.0.up.weight"] if dist.get_rank() == 0 else nn.Parameter(torch.empty(0))
    weight.requires_grad_(dist.get_rank() == 0)
    assert "layers.0.up.weight.requires_grad" in refusal(lambda: parallel(**batch()))
    weight.requires_grad_(False)
    changes = [("layers.1.", True), ("layers.0.", True), ("layers.1.", False), ("layers.1.", True)]

    def change(model: nn.Module) -> Callable[[int], None]:
        def after_step(index: int) -> None:
            for name, parameter in model.named_parameters():
                if name.startswith(changes[index][0]):
                    parameter.requires_grad_(changes[index][1])
            with torch.no_grad():
                model(**batch(9))

        return after_step

    batches = [batch(seed) for seed in range(len(changes))]
    found, expected = (
        train(model, batches, torch.optim.AdamW(model.parameters()), after_step=change(model)) for model in (parallel, reference)
    )
    state = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=state), expected)), wrong[:3]
    assert not (wrong := different_numbers("clip", clipped(parallel, clip_all), clipped(reference, clip_all), 1e-9)), wrong


def clip_all(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def noop(*args: Any) -> None:
    """A hook."""


def hook_of_a_module(plan: str) -> str:
    model = net()
    model.layers[1].up.register_forward_hook(noop)
    said = warning_of(lambda: autopar.parallelize(model, cluster(), batch(), plan=plan))
    assert dist.get_rank() or "layers.1.up" in said
    return said if dist.get_rank() == 0 else ROWS["hook_of_a_module"][1]


def hook_of_a_part(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    part = next(module for name, module in parallel.named_modules() if name.startswith("layers."))
    return refusal(lambda: part.register_forward_hook(noop))


def hook_of_a_parameter(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    for parameter in parallel.parameters():
        parameter.register_hook(noop)
    return refusal(lambda: parallel(**batch()))


def clipped(model: nn.Module, clip: Callable[[nn.Module], Any]) -> list[float]:
    """What `clip` gives after each of three backwards, and the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for seed in range(3):
        optimizer.zero_grad(set_to_none=seed < 2)
        loss = model(**batch(seed))
        loss.backward()
        value = clip(model)
        optimizer.step()
        found += [loss.item(), value.item() if isinstance(value, Tensor) else 0.0]
    return found


def clip_grad_norm(plan: str) -> None:
    def by_hand(model: nn.Module) -> Tensor:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, norm)
        return torch.stack([gradient.norm(2) for gradient in gradients]).norm()

    parallel, start = parallel_of(net(), plan), net().state_dict()
    for clip in (
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"), error_if_nonfinite=True),
        lambda model: torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1, norm_type=1.0),
        by_hand,
        lambda model: torch.nn.utils.get_total_norm([p for p in model.parameters() if p.grad is not None]),
        lambda model: torch.nn.utils.get_total_norm([p.data for p in model.parameters() if p.grad is not None], foreach=False),
        lambda model: torch.stack([p.detach().norm() for p in model.parameters() if p.grad is not None]).norm(),
    ):
        parallel.load_state_dict(start)
        assert not (wrong := different_numbers("clip", clipped(parallel, clip), clipped(net(), clip), 1e-9)), wrong
    one_step(parallel)
    with torch.no_grad():
        for parameter in parallel.parameters():
            torch.testing.assert_close(parameter.norm().full_tensor().item(), parameter.full_tensor().norm().item())
    norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    if dist.get_rank() == 0:  # as a log line does
        assert norm.item() > 0 and not isinstance(norm, DTensor)


def loss_without_backward(plan: str) -> None:
    """A loss that is only looked at, before the step; and a new state after one."""

    def run(model: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for seed in range(3):
            optimizer.zero_grad()
            loss, other = model(**batch(seed)), model(**batch(seed + 5))
            loss.backward()
            other = model(**batch(seed + 5))
            optimizer.step()
            losses += [loss.item(), other.item(), model(**batch(9)).item()]
        return losses

    parallel, start = parallel_of(net(), plan), net().state_dict()
    for _ in range(2):
        parallel.load_state_dict(start)
        assert not (wrong := different_numbers("loss", run(parallel), run(net()), 1e-9)), wrong


def clip_grad_value(plan: str) -> None:
    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    assert not different_numbers("clip", clipped(parallel_of(net(), plan), clip), clipped(net(), clip), 1e-9)


def clip_some_of_them(plan: str) -> None:
    def clip(model: nn.Module) -> Tensor:
        return torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None][:-1], 1e-3)

    assert not (wrong := different_numbers("clip", clipped(parallel_of(net(), plan), clip), clipped(net(), clip), 1e-9)), wrong


def accumulate(plan: str) -> None:
    """Several calls, with and without `no_sync`, and one backward of a sum; gradients kept as zeros."""

    def run(model: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for part in range(2):
                with model.no_sync() if part == 0 and hasattr(model, "no_sync") else contextlib.nullcontext():
                    (model(**batch(2 * step + part)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        (model(**batch(5)) + 0.1 * model(**batch(6))).backward()
        return full_gradients(model)

    found, expected = run(parallel_of(net(), plan)), run(net())
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def backward_left_out_on_one_rank(plan: str) -> str:
    """On a pipeline the gradients are there at once, and the next call notices; elsewhere ranks wait for each other in different
    places, which tests/runtime/faults has."""
    parallel = parallel_of(net(), plan)
    one_step(parallel)
    loss = parallel(**batch(1))
    if parallel.program.mesh.pp.size == 1:
        return ROWS["backward_left_out_on_one_rank"][1]
    if dist.get_rank() != 1:
        loss.backward()
    return refusal(lambda: parallel(**batch(2)))


def penalty(plan: str) -> None:
    """L2, L1, orthogonality, maximum norms and a loss to where they were, in the loss or with a backward of their own; outside of
    the program as an ordinary tensor."""

    def run(model: nn.Module, apart: bool) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        start = [p.detach() * 0.5 for p in model.parameters()]
        for seed in range(3):
            optimizer.zero_grad(set_to_none=seed < 2)
            own = [p for p in model.parameters() if p.requires_grad and p.numel()]
            more = 1e-2 * sum((p**2).sum() for p in own) + 1e-2 * sum(p.abs().sum() for p in own)
            more = more + sum(nn.functional.mse_loss(p, q) for p, q in zip(own, start, strict=True))
            matrices = [p for p in own if p.dim() == 2]
            more = more + 1e-2 * sum((p.t() @ p - torch.eye(p.shape[1], dtype=p.dtype)).norm() for p in matrices)
            more = more + 1e-2 * sum(p.norm(float("inf")) for p in own)
            loss = model(**batch(seed))
            if apart:
                loss.backward()
                more.backward()
            else:
                loss = loss + more
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    parallel, start = parallel_of(net(), plan), net().state_dict()
    for apart in (True, False):
        reference = net()
        parallel.load_state_dict(start)
        assert not (wrong := different_numbers("loss", run(parallel, apart), run(reference, apart), 1e-9)), (apart, wrong)
        state = parallel.full_state()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-11, msg=name)
        for model in (parallel, reference):  # alone, and gathered on the way
            model.zero_grad()
            sum((p.flatten().sort().values ** 2).sum() for p in model.parameters() if p.requires_grad).backward()
        gradients = parallel.full_gradients()
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)


def transforms_of_torch_func(plan: str) -> str:
    """The model goes on after each."""
    parallel, x, ids = parallel_of(net(), plan), *batch().values()
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda x: parallel(x, ids))(x),
        lambda: torch.func.jacrev(parallel)(x, ids),
        lambda: torch.func.vmap(lambda x, id: parallel(x[None], id[None]))(x, ids),
        lambda: torch.func.jvp(lambda x: parallel(x, ids), (x,), (x,)),
    ]
    lines = {refusal(each) for each in calls}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        lines.add(refusal(lambda: parallel(dual, ids)))
    equals_one_process(parallel, net())
    return " ".join(lines)


def several_backwards_at_once(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    loss = parallel(**batch())
    each = next(parallel.parameters())
    said = refusal(lambda: torch.autograd.grad(loss, each, torch.ones(2, dtype=loss.dtype), is_grads_batched=True))
    loss.backward()
    parallel.zero_grad()
    equals_one_process(parallel, net())
    return said
