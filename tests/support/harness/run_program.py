"""What a rank does with the text of a program: one step, some steps of AdamW, or counting its collectives."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.harness.comparison import Outcome
from support.harness.training_loop import RATE, STEPS, Batch, Call, Training, adamw, parallel_model, train

Case = tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]
"""Text of the program, initial state, and the batch of every step."""
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def train_step(text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], compile: str = "") -> Any:
    """Loss, full gradients and buffers by original name, without an optimizer."""
    parallel = parallel_model(text, state, compile=compile)
    loss = parallel(**batch)
    loss.backward()
    gradients = {}
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor()
    return loss.item(), gradients, dict(parallel.named_buffers())


def train_steps(cases: Sequence[Case]) -> list[Any]:
    """`train_step` of several programs, one after another; an error names its case."""
    out = []
    for index, case in enumerate(cases):
        try:
            out.append(train_step(*case))
        except Exception as error:
            raise RuntimeError(f"case {index}: {error}\n{case[0]}") from error
    return out


def train_calls(cases: Sequence[tuple[str, Mapping[str, Tensor], Sequence[Batch | Call]]]) -> list[Training]:
    """The training of several programs, each with its own calls."""
    return [train(parallel_model(text, state), calls) for text, state, calls in cases]


def train_programs(cases: Sequence[Case], steps: int = STEPS, rate: float = RATE) -> list[Outcome]:
    """The outcome of several programs after some steps on one batch."""
    return [outcome for outcome, _ in train_pipelines(cases, steps, rate)]


def train_pipelines(
    cases: Sequence[Case], steps: int = STEPS, rate: float = RATE, compile: str = ""
) -> list[tuple[Outcome, tuple[str, ...]]]:
    """Each program's outcome, and the actions of this rank in its last step (none without a pipeline)."""
    out = []
    for text, state, batch in cases:
        parallel = parallel_model(text, state, compile=compile)
        found = train(parallel, [batch] * steps, adamw(rate))
        buffers = _names_on_all_ranks([name for name, _ in parallel.named_buffers()])
        parameters = {name: tensor for name, tensor in found.state.items() if name not in buffers}
        rest = {name: tensor for name, tensor in found.state.items() if name in buffers}
        out.append((Outcome(found.losses[0], found.gradients, parameters, rest), tuple(parallel.trace())))
    return out


def train_compiled(cases: Sequence[Case], backend: str) -> tuple[list[Outcome], list[str]]:
    """On a rank: what the programs give when they are compiled, and what was said of it."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = [outcome for outcome, _ in train_pipelines(cases, compile=backend)]
    return outcomes, [str(each.message) for each in caught if "not compiled" in str(each.message)]


def _names_on_all_ranks(mine: list[str]) -> set[str]:
    import torch.distributed as dist

    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {name for names in found for name in names}


def count_collectives(text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Counter[str]:
    """Functional collectives by kind in one forward and backward."""
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional":
                counts.update([KINDS[name] for name in [func._schema.name.split("::")[1]] if name in KINDS])
            return func(*args, **(kwargs or {}))

    parallel = parallel_model(text, state)
    with Counting():
        parallel(**batch).backward()
    return counts
