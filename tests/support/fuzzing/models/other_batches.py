"""The graph of a random model at other sizes of the batch than that of its example: what the program says that it takes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from support.fuzzing.models.on_ranks import loss_in, parts_of
from support.fuzzing.models.writer import Unfit, Written, model_of, write_model
from support.harness.training_loop import graph_state
from support.oracles.interpret_graph import loss_and_gradients, takes_batch

SIZES = (1, 2, 3, 5, 7, 9)


def check_batches(seed: int, folder: Path) -> Iterator[str]:
    """Yield a line for each size at which the graph of a seed's model gives another loss or gradient than the model, and an empty
    one for each at which they are equal."""
    written = write_model(seed)
    path = folder / f"batches_{seed}.py"
    path.write_text(written.text)
    with warnings.catch_warnings(action="ignore"):
        try:
            model = model_of(written, seed, str(path))
            graph = capture(model, (), {name: tensor.clone() for name, tensor in written.inputs.items()})
        except (AutoparError, Unfit):
            return
        sized = graph.batch_is_symbolic and all(x.shape[:1] == (graph.batch,) for x in written.inputs.values())
        if written.random or not sized or graph.interface is None or not graph.interface.has_loss:
            return
        for batch in filter(lambda batch: takes_batch(graph, batch), SIZES):
            yield from _check(graph, model, _inputs_of(written, batch), batch)


def _inputs_of(written: Written, batch: int) -> dict[str, torch.Tensor]:
    """Return the inputs of so many examples: those that there are, and again in other sizes."""

    def copies(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * (1 + 0.1 * each) if x.is_floating_point() else x for each in range(batch)]

    return {name: torch.cat(copies(x))[:batch].clone() for name, x in written.inputs.items()}


def _check(graph: Graph, model: nn.Module, inputs: dict[str, torch.Tensor], batch: int) -> Iterator[str]:
    one = copy.deepcopy(model)
    try:
        loss = loss_in(parts_of(one(**{name: x.clone() for name, x in inputs.items()})))
        loss.backward()
    except (RuntimeError, ValueError, IndexError):  # no batch of the model
        return
    named = {each.name for each in graph.inputs}
    state = {name: x.detach() for name, x in graph_state(graph, model).items()}
    found, gradients = loss_and_gradients(
        replace(graph, batch=batch), state, {name: x for name, x in inputs.items() if name in named}
    )
    pairs = [(torch.tensor(found), loss.detach().double())]
    pairs += [(gradients[name], x.grad) for name, x in one.named_parameters() if x.grad is not None and name in gradients]
    same = all(torch.allclose(ours.double(), exact.double(), 1e-6, 1e-9, equal_nan=True) for ours, exact in pairs)
    yield "" if same else f"batch {batch} of a graph of {graph.batch}: {found} for {loss.item()}"
