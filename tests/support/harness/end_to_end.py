"""The whole way for one small model: capture, search, program; and what one process makes of the same model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.program.build import program_text
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.verification.single import LiftCasts, lift_casts
from support.harness.comparison import Outcome, differences
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import STEPS, graph_state, train
from support.models.further_families import further_families
from support.models.model_families import families
from support.models.small_models import VOCABULARY, cases, long_cases, make_case, routed_cases, token_batch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with its graph, one batch, its initial state and what one process makes of it."""

    name: str
    graph: Graph
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    expected: Outcome


def reference(model: nn.Module, batch: dict[str, Tensor], lift: bool) -> Outcome:
    """One process. `lift`: with the casts to float32 lifted to float64."""
    with LiftCasts() if lift else nullcontext():
        found = train(model, [batch] * STEPS)
    buffers = {name for name, _ in model.named_buffers()}
    parameters = {name: tensor for name, tensor in found.state.items() if name not in buffers}
    return Outcome(found.losses[0], found.gradients, parameters, {name: found.state[name] for name in buffers})


def prepare(name: str, dtype: torch.dtype = torch.float64, batch: int = 16) -> Prepared:
    """Captured in `dtype`, once a session; in float64 the casts inside the model are lifted, in graph and reference alike."""
    return _prepared(name, dtype, batch)


@cache
def _prepared(name: str, dtype: torch.dtype, batch: int) -> Prepared:
    model, inputs = make_case((families() | further_families() | cases() | long_cases() | routed_cases())[name], dtype, batch)
    lift = dtype is torch.float64
    graph = capture(model, (), inputs, compute_dtype=str(dtype).removeprefix("torch."))
    return prepare_model(name, model, inputs, lift_casts(graph) if lift else graph, lift)


def prepare_model(
    name: str, model: nn.Module, batch: dict[str, Tensor], graph: Graph | None = None, lift: bool = False
) -> Prepared:
    """A model, and its `graph` where that is not captured in this way; `lift` as for `reference`."""
    graph = graph or capture(model, (), batch)
    return Prepared(name, graph, graph_state(graph, model), batch, reference(model, batch, lift))


@cache
def prepare_dropout(**changes: float) -> Prepared:
    """GPT-2 in float64 with dropout, attention's too (but for `changes`); expected is only the loss of an evaluation."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64, **changes)
    model, batch = transformers.GPT2LMHeadModel(config).double(), token_batch(16)
    graph = capture(model, (), batch)
    return Prepared("gpt2", graph, graph_state(graph, model), batch, Outcome(model.eval()(**batch).loss.item(), {}, {}, {}))


def sharding_wins(size: int = 4) -> Cluster:
    """A cluster of slow devices with little memory on fast links, where whatever is repeated costs more than what is sent."""
    cluster = Cluster.parse(f"local:{size}")
    fast = tuple(replace(link, bandwidth_bytes_per_second=1e15, latency_seconds=1e-12) for link in cluster.links)
    device = replace(cluster.device, launch_seconds=0.0)
    return replace(cluster, name="sharding-wins", links=fast, device=device)


def plan(prepared: Prepared, force: dict[str, int], cluster: Cluster | None = None) -> PlanResult:
    """The search's answer; without a pipeline, unless one is forced."""
    dtype = next(v.value.dtype for v in prepared.graph.parameters().values() if v.trainable)
    options = SearchOptions(batch=prepared.graph.batch, precision=Precision(dtype, dtype), force={"pp": 1, **force})
    return search(prepared.graph, cluster or Cluster.parse("local:4"), options)


def program(prepared: Prepared, result: PlanResult) -> str:
    """The text that ranks run."""
    return program_text(prepared.graph, result.candidate)


def check_programs(
    ranks: RankPool, case: Prepared, texts: Sequence[str], names: Iterable[object] = (), *, world: int = 4,
    tolerance: float = 1e-9, parameters: bool = True,
) -> None:  # fmt: skip
    """Each program trains as one process does, by the first rank and the last; `names` are what an error calls them."""
    answers = ranks.run(train_programs, [(text, case.state, case.batch) for text in texts], world=world, timeout=400)
    for rank in (0, world - 1):
        for name, text, found in zip(list(names) or range(len(texts)), texts, answers[rank], strict=True):
            wrong = differences(found, case.expected, tolerance, parameters)
            assert not wrong, f"{case.name}, {name}, rank {rank}: {wrong[:5]}\n{text}"
