"""A received tensor is held by what saves it, and by nothing else."""

from __future__ import annotations

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.pipeline.executor import InputGradient, received_tensor


def test_the_gradient_is_that_of_a_leaf() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    leaf, gradient = x.clone().requires_grad_(), InputGradient()
    given = received_tensor(x, gradient)
    for each in (leaf, given):
        (each.sin() + each * each.detach()).sum().backward()
    assert gradient.value is not None and leaf.grad is not None and torch.equal(gradient.value, leaf.grad)


def test_without_use_there_is_no_gradient() -> None:
    gradient = InputGradient()
    received_tensor(torch.ones(2), gradient)
    assert gradient.value is None


def test_it_is_freed_where_nothing_saves_it() -> None:
    gradient = InputGradient()
    x = torch.ones(5)
    storage = StorageWeakRef(x.untyped_storage())
    y = received_tensor(x, gradient) + 1.0  # saves nothing
    del x
    gc.collect()
    assert storage.expired()
    y.sum().backward()
    assert gradient.value is not None and gradient.value.tolist() == [1.0] * 5
