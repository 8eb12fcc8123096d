"""The loss from the operands of the head, in chunks of tokens: the numbers of the whole, and never whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_models.tensors.observe_saves import LiveBytes
from autopar.runtime.ops.losses import cross_entropy_sum, linear_cross_entropy_sum

TOKENS, WIDTH, CLASSES, CHUNK = 3 * 37, 16, 50, 20


def operands(dtype: torch.dtype, bias: bool, *frozen: int) -> tuple[list[Tensor | None], Tensor]:
    torch.manual_seed(0)
    shapes = ((3, 37, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    made: list[Tensor | None] = [
        torch.randn(shape, dtype=dtype).requires_grad_(i not in frozen) if i < 2 + bias else None
        for i, shape in enumerate(shapes)
    ]
    target = torch.randint(0, CLASSES, (3, 37))
    target[0, :25] = -100  # a whole chunk, and a part of one
    return made, target


def gradients(loss: Tensor, made: list[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(0.3 * loss, [each for each in made if each is not None and each.requires_grad]))


@pytest.mark.parametrize(("bias", "smoothing"), [*itertools.product((False, True), (0.0, 0.1))])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
def test_chunks_are_the_whole(bias: bool, smoothing: float, frozen: tuple[int, ...]) -> None:
    (x, weight, b), target = operands(torch.float64, bias, *frozen)
    assert x is not None and weight is not None
    whole = cross_entropy_sum(F.linear(x, weight, b), target, -100, smoothing)
    for chunk in (1, CHUNK, 1000):
        loss = linear_cross_entropy_sum(x, weight, b, target, -100, smoothing, chunk)
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        found, expected = gradients(loss, [x, weight, b]), gradients(whole, [x, weight, b])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(linear_cross_entropy_sum(x, weight, b, target, -100, smoothing, chunk), whole)
        whole = cross_entropy_sum(F.linear(x, weight, b), target, -100, smoothing)


def test_half_precision_is_as_exact_as_the_whole() -> None:
    (x, weight, b), target = operands(torch.bfloat16, True)
    assert x is not None and weight is not None and b is not None
    wide = [each.detach().double().requires_grad_() for each in (x, weight, b)]
    exact = gradients(cross_entropy_sum(F.linear(*wide), target), list(wide))
    found = gradients(linear_cross_entropy_sum(x, weight, b, target, -100, 0.0, CHUNK), [x, weight, b])
    whole = gradients(cross_entropy_sum(F.linear(x, weight, b), target), [x, weight, b])
    for each, other, right in zip(found, whole, exact, strict=True):
        assert (each - right).norm() < 1.5 * (other - right).norm()


def test_a_target_beyond_the_classes_is_an_error() -> None:
    (x, weight, b), target = operands(torch.float64, False)
    target[1, 1] = CLASSES
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy_sum(x, weight, b, target, -100, 0.0, CHUNK)  # type: ignore[arg-type]


def test_a_graph_that_is_kept_has_a_second_backward() -> None:
    """Of another scale; as of the whole loss. Without ``retain_graph`` it is torch's error."""
    (x, weight, b), target = operands(torch.float64, True)
    of: Any = [x, weight, b]
    loss = linear_cross_entropy_sum(x, weight, b, target, -100, 0.0, CHUNK)  # type: ignore[arg-type]
    whole = cross_entropy_sum(F.linear(*of), target)
    for scale, keep in ((0.3, True), (0.7, False)):
        found = torch.autograd.grad(scale * loss, of, retain_graph=keep)
        torch.testing.assert_close(found, torch.autograd.grad(scale * whole, of, retain_graph=True), rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, of)


def test_no_tokens_have_no_loss_and_gradients_of_zeros() -> None:
    (x, weight, b), target = operands(torch.float64, True)
    of: Any = [x[:0].detach().requires_grad_(), weight, b]  # type: ignore[index]
    loss = linear_cross_entropy_sum(*of, target[:0], -100, 0.1, CHUNK)
    found = gradients(loss, of)
    assert loss.item() == 0 and [each.shape for each in found] == [each.shape for each in of] and not any(map(torch.any, found))


def test_compiled_chunks_are_the_same() -> None:
    """One graph, with gradients and without."""
    (x, weight, b), target = operands(torch.float64, True)

    def loss_of(*given: Any) -> Tensor:
        return linear_cross_entropy_sum(*given, target, -100, 0.1, 40)

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    eager, found = loss_of(x, weight, b), compiled(x, weight, b)
    torch.testing.assert_close(found, eager)
    torch.testing.assert_close(gradients(found, [x, weight, b]), gradients(eager, [x, weight, b]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight, b), eager)


def test_a_compiled_graph_does_not_grow_with_the_chunks() -> None:
    (x, weight, b), target = operands(torch.float64, True)
    sizes = list[int]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(sum(len(each.graph.nodes) for each in graph.modules() if isinstance(each, torch.fx.GraphModule)))
        return graph

    for chunk in (TOKENS, 1):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: linear_cross_entropy_sum(*given, target, -100, 0.0, chunk), backend=backend)  # noqa: B023
        compiled(x, weight, b)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_logits_are_never_whole(dtype: torch.dtype, width: int) -> None:
    """The most bytes alive are the gradients and one chunk's logits (in half precision beside their float32 copy)."""
    tokens, hidden, classes, chunk = 4096, 32, 4000, 512
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (tokens,))

    def peak(function: Any, *args: Any) -> int:
        live = LiveBytes()
        live.exclude(x, weight, target)
        with live:
            function(*args).backward()
        x.grad = weight.grad = None
        return live.peak

    held = peak(linear_cross_entropy_sum, x, weight, None, target, -100, 0.0, chunk)
    whole = peak(lambda: cross_entropy_sum(F.linear(x, weight), target))
    made = width * hidden * (tokens + classes)
    logits = chunk * classes * (4 if width == 4 else 6)
    assert made + logits <= held <= 1.05 * (made + logits)
    assert whole >= 8 * tokens * classes > 4 * held
