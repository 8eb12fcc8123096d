"""Finds a backward through weights that have changed since its forward, as autograd does for the tensors that it has saved.

Programs save parts and gathered copies of the parameters, of which autograd keeps no versions. A backward that reaches other
parameters only (of two optimizers, one has made its step) is right.
"""

from __future__ import annotations

from functools import partial

import torch

from ..compat.autograd import at_end_of_backward
from ..compat.dtensor import local_of
from ..errors import RuntimeProblem
from ..state.materialize import State


def watch_weights(output: torch.Tensor, state: State) -> None:
    """Raise a RuntimeProblem at the end of the backward of `output` where it reached a parameter that has changed by then."""
    if output.grad_fn is None:
        return
    before = _versions(state)

    def begin(_: object) -> None:
        changed = [name for name, old, new in zip(state.parameters, before, _versions(state), strict=True) if old != new]
        if changed:
            gradients = {name: _version_of_gradient(state, name) for name in changed}
            at_end_of_backward(partial(at_end_of_backward, partial(_check, state, gradients)))  # after those of all others

    output.grad_fn.register_prehook(begin)


def _check(state: State, before: dict[str, tuple[int, ...]]) -> None:
    for name, gradient in before.items():
        if _version_of_gradient(state, name) != gradient:
            raise RuntimeProblem(
                f"{name} has changed (optimizer.step()?) between the forward of this loss and its backward, whose gradient may "
                "be neither that of the old weights nor of the new ones: call backward before the step, or the model once more"
            )


def _versions(state: State) -> list[int]:
    return [parameter._version for parameter in state.parameters.values()]


def _version_of_gradient(state: State, name: str) -> tuple[int, ...]:
    gradient = state.parameters[name].grad
    return () if gradient is None else (id(gradient), gradient._version, local_of(gradient)._version)
