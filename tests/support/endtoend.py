"""The whole way for one small model: capture, search, program, real processes; beside the same model on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from support.lift import LiftedCasts, lift_graph
from support.models import VOCABULARY, cases, long_cases, make_case, routed_cases, words
from support.outside import outside
from support.zoo import families
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.hardware import Cluster
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.passes.pipeline import lower
from autopar.program.source import render
from autopar.solve.search import SearchOptions, SearchResult, search

STEPS = 3
RATE = 1e-3
Outcome = tuple[float, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Loss, gradients of the first step; parameters and buffers after `STEPS` steps of AdamW."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with its graph, one batch, its initial state and what one process makes of it."""

    name: str
    graph: Graph
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    expected: Outcome


def loss_of(output: Any) -> Tensor:
    """The scalar that a model returned."""
    return output if isinstance(output, Tensor) else output.loss  # type: ignore[no-any-return]


def reference(model: nn.Module, batch: dict[str, Tensor], lift: bool) -> Outcome:
    """One process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    first: tuple[float, dict[str, Tensor]] | None = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        if lift:
            with LiftedCasts():
                loss = loss_of(model(**batch))
                loss.backward()
        else:
            loss = loss_of(model(**batch))
            loss.backward()
        if first is None:
            first = loss.item(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    assert first is not None
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return (*first, parameters, {name: buffer.clone() for name, buffer in model.named_buffers()})


def prepare(name: str, dtype: torch.dtype = torch.float64, batch: int = 16) -> Prepared:
    """Captured in `dtype`, once a session; in float64 the casts inside the model are lifted, in graph and reference alike."""
    return _prepared(name, dtype, batch)


@cache
def _prepared(name: str, dtype: torch.dtype, batch: int) -> Prepared:
    model, inputs = make_case((families() | outside() | cases() | long_cases() | routed_cases())[name], dtype, batch)
    lift = dtype is torch.float64
    graph = capture(model, (), inputs, compute_dtype=str(dtype).removeprefix("torch."))
    graph = lift_graph(graph) if lift else graph
    needed = graph.parameters()
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {key: tensor.detach().clone() for key, tensor in tensors if key in needed}
    return Prepared(name, graph, state, inputs, reference(model, inputs, lift))


@cache
def prepare_dropout() -> Prepared:
    """GPT-2 in float64 with dropout, attention's too; expected is only the loss of an evaluation."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    model, batch = transformers.GPT2LMHeadModel(config).double(), words(16)
    graph = capture(model, (), batch)
    named = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    state = {name: named[name] for name in graph.parameters()}
    return Prepared("gpt2", graph, state, batch, (model.eval()(**batch).loss.item(), {}, {}, {}))


def sharding_wins(size: int = 4) -> Cluster:
    """A cluster of slow devices with little memory on fast links, where whatever is repeated costs more than what is sent."""
    cluster = Cluster.parse(f"local:{size}")
    fast = tuple(replace(link, bandwidth_bytes_per_second=1e15, latency_seconds=1e-12) for link in cluster.links)
    device = replace(cluster.device, launch_seconds=0.0)
    return replace(cluster, name="sharding-wins", links=fast, device=device)


def plan(prepared: Prepared, force: dict[str, int], cluster: Cluster | None = None) -> SearchResult:
    """The search's answer; without a pipeline, unless one is forced."""
    dtype = next(v.value.dtype for v in prepared.graph.parameters().values() if v.trainable)
    options = SearchOptions(batch=prepared.graph.batch, precision=Precision(dtype, dtype), force={"pp": 1, **force})
    return search(prepared.graph, cluster or Cluster.parse("local:4"), options)


def program(prepared: Prepared, result: SearchResult) -> str:
    """The text that ranks run."""
    return render(lower(prepared.graph, result.candidate))


def run_programs(
    cases: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]], steps: int = STEPS, rate: float = RATE
) -> list[Outcome]:
    """On a rank: each program trained for some steps."""
    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    out: list[Outcome] = []
    for text, state, batch in cases:
        made = load(text).Program
        parallel = Parallel(made(MeshHandle(made.mesh_axes)), state)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
        first: tuple[float, dict[str, Tensor]] | None = None
        for _ in range(steps):
            optimizer.zero_grad()
            loss = parallel(**batch)
            loss.backward()
            if first is None:
                first = loss.item(), parallel.full_gradients()
            optimizer.step()
        assert first is not None
        buffers = _all_names([name for name, _ in parallel.named_buffers()])
        whole = parallel.full_state()
        parameters = {name: tensor for name, tensor in whole.items() if name not in buffers}
        out.append((*first, parameters, {name: tensor for name, tensor in whole.items() if name in buffers}))
    return out


def _all_names(mine: list[str]) -> set[str]:
    """Of all ranks."""
    import torch.distributed as dist

    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {name for names in found for name in names}


def differences(found: Outcome, expected: Outcome, tolerance: float, parameters: bool = True) -> list[str]:
    """What differs by more than `tolerance`, relative to each tensor's largest value; a gradient that is noise beside the largest
    gradient of all (mathematically zero, such as that of a key bias) counts relative to that times 1e-3."""
    out = []
    if not abs(found[0] - expected[0]) <= tolerance * abs(expected[0]):
        out.append(f"loss {found[0]} instead of {expected[0]}")
    tables = [("gradient", found[1], expected[1])]
    if parameters:
        tables += [
            ("parameter", found[2], expected[2]),
            ("buffer", found[3], {k: v for k, v in expected[3].items() if k in found[3]}),
        ]
    for kind, mine, theirs in tables:
        if mine.keys() != theirs.keys():
            out.append(f"{kind}s of {sorted(mine.keys() ^ theirs.keys())} on one side only")
            continue
        floor = 1e-3 * max((float(tensor.abs().max()) for tensor in theirs.values()), default=0.0)
        for name, tensor in theirs.items():
            scale = max(float(tensor.abs().max()), floor if kind == "gradient" else 1e-12)
            error = float((mine[name].double() - tensor.double()).abs().max()) / scale
            if not error <= tolerance:
                out.append(f"{kind} {name} off by {error:.2g}")
    return out
