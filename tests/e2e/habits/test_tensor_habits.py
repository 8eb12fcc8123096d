"""Habits around the parameters and gradients as tensors: random numbers, copies, sums by hand (docs/habits.md), on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.harness.training_loop import train
from support.models.habit_model import batch, net
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Draw = Callable[[nn.Parameter], Any]


def whole(x: Tensor) -> Tensor:
    """A copy."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def copies_agree(parallel: Any) -> None:
    """Each parameter has one value on all ranks that have it."""
    mine = {name: whole(parameter.detach()) for name, parameter in parallel.named_parameters()}
    every: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    for theirs in every:
        for name in mine.keys() & theirs.keys():
            assert torch.equal(mine[name], theirs[name]), name


def draw_alike(parallel: Any, reference: nn.Module, *draws: Draw, seed: Callable[[], int] = lambda: 3) -> None:
    """Each draw of each parameter (in the order of names) gives what one process gets."""
    mine, theirs = dict(parallel.named_parameters()), dict(reference.named_parameters())
    for draw in draws:
        torch.manual_seed(seed())
        found = {name: whole(draw(mine[name])) for name in theirs}
        torch.manual_seed(3)
        for name in theirs:
            torch.testing.assert_close(found[name], whole(draw(theirs[name])), rtol=1e-12, atol=1e-12, msg=name)
    copies_agree(parallel)


def both_models(path: str) -> tuple[Any, nn.Module]:
    """Both with gradients of all parameters."""
    parallel, reference = parallel_of(without_unused(), path), without_unused()
    one_step(parallel)
    reference(**batch()).backward()
    return parallel, reference


def initialise_shards(plan: str) -> None:
    def matrices(initialise: Draw) -> Draw:
        return lambda p: initialise(p) if p.dim() > 1 else nn.init.normal_(p)

    draw_alike(
        *both_models(plan),
        *map(matrices, (nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.kaiming_uniform_)),
        matrices(nn.init.xavier_normal_),
        matrices(nn.init.orthogonal_),
        matrices(nn.init.eye_),
        matrices(lambda p: nn.init.sparse_(p, 0.3)),
        lambda p: p.data.normal_(),
    )


def initialise_with_a_seed_of_each_rank(plan: str) -> None:
    """The numbers of rank 0; each rank's own generator stays its own."""
    parallel, reference = both_models(plan)
    draw_alike(parallel, reference, nn.init.normal_, seed=lambda: 3 + dist.get_rank())
    torch.manual_seed(3 + dist.get_rank())
    expected = torch.rand(3)
    torch.manual_seed(3 + dist.get_rank())
    for parameter in parallel.parameters():
        nn.init.normal_(parameter)
    if dist.get_rank():
        torch.testing.assert_close(torch.rand(3), expected)


def noise_on_gradients(plan: str) -> None:
    parallel, reference = both_models(plan)
    draw_alike(
        parallel,
        reference,
        lambda p: nn.functional.dropout(p.detach() + 1, 0.4),
        lambda p: torch.bernoulli(p.detach().sigmoid()),
    )
    draw_alike(
        parallel,
        reference,
        lambda p: torch.randn_like(p.grad),
        lambda p: torch.rand_like(p),
        lambda p: p.grad.add_(torch.randn_like(p.grad), alpha=0.1),
        lambda p: p.grad.data.uniform_(),
    )
    parallel, reference = both_models(plan)
    losses = []
    for model in (parallel, reference):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            loss = model(**batch(seed))
            loss.backward()
            for parameter in model.parameters():
                parameter.grad += 0.1 * torch.randn_like(parameter.grad)
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-9, atol=1e-9)


def write_into_parts(plan: str) -> None:
    """Rows, slices and indices of weights and gradients, of which some cross the shards."""
    parallel, reference = both_models(plan)
    mine, theirs = dict(parallel.named_parameters()), dict(reference.named_parameters())
    for p in (*mine.values(), *(theirs[name] for name in theirs)):
        with torch.no_grad():
            p[0] = 0.5
            p[-1].mul_(0.25)
            p.flatten()[1:3].add_(1.0)
            p.t()[torch.tensor([0, 2])] = 0.75
            p[1] = torch.arange(p[1].numel(), dtype=p.dtype).view(p[1].shape)
        p.data[2].zero_()
        p.grad[0].zero_()
    for name in mine:
        assert torch.equal(whole(mine[name].detach()), theirs[name]), name
        assert torch.equal(whole(mine[name].grad)[0], theirs[name].grad[0]), name
    torch.testing.assert_close(parallel(**batch()), reference(**batch()), rtol=1e-9, atol=1e-9)


def items_by_masks(plan: str) -> None:
    """And all else of whole tensors: numpy, lists, renorm. Arrays cannot be written, which would not reach the tensor."""
    parallel, reference = both_models(plan)
    mine, theirs = dict(parallel.named_parameters()), dict(reference.named_parameters())
    with torch.no_grad():
        for name in theirs.keys() & mine.keys():
            for p in (mine[name], theirs[name]):
                p[p > 0.1] *= 0.5
                p[p < 0] = p[p < 0] * 2
                p[p.abs() < 0.01] = 0.3
                p.add_(torch.masked_select(p, p > 0).sum() * 0.01 + len(torch.nonzero(p > 0)))
                p.add_((p.norm(dim=0).sum() + p.norm().expand(3).sum()) * 0.01 + (p > 0.2).any(0).sum() + (p > 0).any().float())
                p.add_(sum(p.view(-1).topk(k).values.sum() * 0.01 for k in (2, 3)) + torch.quantile(p, 0.3))
                if p.dim() > 1:
                    p.copy_(torch.renorm(p, 2, 0, 0.5))
            torch.testing.assert_close(whole(mine[name]), whole(theirs[name]), rtol=1e-12, atol=1e-12)
            lines = [f"{p.mean():.4f} {p.norm() ** 2:.3f} {p.grad.norm():.3f}" for p in (mine[name], theirs[name])]
            assert lines[0] == lines[1]
            index, q = torch.tensor([0, -1]), torch.ones(theirs[name].shape[-1], 1, dtype=torch.float64)
            values = ([(p @ q).sum(), p[index].sum(), sum(row.sum() for row in p)] for p in (mine[name], theirs[name]))
            torch.testing.assert_close(*([*map(whole, each)] for each in values), rtol=1e-12, atol=1e-12)
            assert torch.allclose(mine[name], mine[name] * 1)
            array = mine[name].detach().cpu().numpy()
            assert array.tolist() == mine[name].tolist() == whole(mine[name]).tolist() and not array.flags.writeable
    copies_agree(parallel)


def without_unused() -> nn.Module:
    model = net()
    model.unused = None  # type: ignore[assignment]
    return model


def average_by_hand(plan: str) -> None:
    """A plain copy of the model that takes part of the weights after each step, paired by `zip`."""

    def run(model: nn.Module) -> nn.Module:
        average, optimizer = without_unused(), torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            model(**batch(seed)).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        return average

    parallel = parallel_of(without_unused(), plan)
    expected = dict(run(without_unused()).named_parameters())
    for name, mean in run(parallel).named_parameters():
        torch.testing.assert_close(mean, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def positions_with_unused_parameters(plan: str) -> None:
    """Learning rates by positions in the list of parameters; the last of which are frozen."""

    def run(model: nn.Module) -> list[float]:
        for parameter in list(model.parameters())[-2:]:
            parameter.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.01 * 0.9**at} for at, p in enumerate(trained)])
        return train(model, [batch(seed) for seed in range(3)], optimizer).losses

    assert not (wrong := different_numbers("loss", run(parallel_of(net(), plan)), run(net()), 1e-9)), wrong


def copy_both_ways(plan: str) -> None:
    parallel, reference = parallel_of(without_unused(), plan), without_unused()
    pairs = [(p, reference.get_parameter(name)) for name, p in parallel.named_parameters()]
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs * 2)
            mine.mul_(torch.full_like(theirs, 0.5)).add_(theirs)
            expected = (theirs * 2).clone()
            theirs.copy_(mine)
            assert torch.equal(theirs, expected) and torch.equal(whole(mine), expected)
        said = refusal(lambda: pairs[0][0].copy_(pairs[0][1] + dist.get_rank()))
        assert "ranks write different values into a parallel model's parameter" in said
    torch.testing.assert_close(parallel(**batch()), reference(**batch()))


def gradients_by_grad(plan: str) -> None:
    """`torch.autograd.grad`, by all parameters and an input; the gradients that are there stay as they are."""
    parallel, reference = both_models(plan)
    mine, theirs = dict(parallel.named_parameters()), dict(reference.named_parameters())
    before = {name: whole(parameter.grad) for name, parameter in mine.items()}
    found = torch.autograd.grad(parallel(**batch(1)), list(mine.values()))
    expected = dict(zip(theirs, torch.autograd.grad(reference(**batch(1)), list(theirs.values())), strict=True))
    for name, gradient in zip(mine, found, strict=True):
        torch.testing.assert_close(whole(gradient), expected[name], rtol=1e-9, atol=1e-11, msg=name)
        assert torch.equal(whole(mine[name].grad), before[name]), name
    one = next(iter(mine))
    (gradient,) = torch.autograd.grad(parallel(**batch(1)) * 2, [mine[one]])
    torch.testing.assert_close(whole(gradient), expected[one] * 2, rtol=1e-9, atol=1e-11)
    kept = list(mine)[len(mine) > 1 :]  # a stage may have one
    parallel(**batch(1)).backward(inputs=[mine[name] for name in kept])
    for name, parameter in mine.items():
        added = expected[name] if name in kept else 0
        torch.testing.assert_close(whole(parameter.grad), before[name] + added, rtol=1e-9, atol=1e-11, msg=name)
    for again in (
        lambda loss: loss.backward(create_graph=True),
        lambda loss: torch.autograd.grad(loss, list(mine.values()), create_graph=True),
    ):
        assert "leave create_graph out" in refusal(lambda again=again: again(parallel(**batch(1))))


def filter_gradients(plan: str) -> None:
    """By `.data`, with a moving average that is amplified (Grokfast); also of a gradient that the script has set itself."""
    parallel, reference = both_models(plan)
    for model in (parallel, reference):
        optimizer, averages = torch.optim.SGD(model.parameters(), lr=0.1), dict[str, torch.Tensor]()
        for seed in range(3):
            optimizer.zero_grad()
            model(**batch(seed)).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    averages[name] = averages.get(name, 0) * 0.9 + parameter.grad.data.detach() * 0.1
                    parameter.grad.data = parameter.grad.data + averages[name] * 2.0
                    if seed == 2:
                        parameter.grad = parameter.grad * 0.5
                        parameter.grad.data = averages[name]
            optimizer.step()
    torch.testing.assert_close(parallel(**batch()), reference(**batch()), rtol=1e-9, atol=1e-12)
    parallel.zero_grad()
    one_step(parallel)
    gradient = next(p.grad for p in parallel.parameters() if p.grad is not None)
    assert "compute it of the gradient" in refusal(lambda: setattr(gradient, "data", torch.zeros(gradient.shape)))
    with pytest.raises(TypeError, match="compute it of the DTensor's"):
        (gradient * 0.5).data = torch.zeros(gradient.shape, dtype=gradient.dtype)


def reduce_gradients_by_hand(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    one_step(parallel)
    parameter = next(each for each in parallel.parameters() if each.grad is not None)
    said = refusal(lambda: dist.broadcast(parameter.data, 0))
    assert "broadcast of a DTensor" in said and "ZeroRedundancyOptimizer" in said
    return refusal(lambda: dist.all_reduce(parameter.grad))
