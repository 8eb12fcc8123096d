"""Compiled blocks: the same numbers, and no more saved for the backward than the plan says."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, plan, prepare, prepare_dropout, program
from support.harness.rank_pool import RankPool
from support.harness.run_program import Case, train_compiled, train_steps
from support.harness.training_loop import full_gradients, parallel_model
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept, with_partition, with_replays
from support.plans.mesh import mesh_of
from support.plans.pipeline_plans import candidate_text, pipeline_candidate

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.ir.plan import Candidate, Pipeline, Precision
from autopar.program.build import program_text
from autopar.runtime.compat import eager_call
from autopar.runtime.device.offload import OffloadedCall, OffloadedTensor
from autopar.runtime.step.recompute import Recompute

F64 = Precision("float64", "float64")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
PARTITIONED = "aot_eager_decomp_partition"
"""AOTAutograd with the partition of inductor, and no kernels to compile."""
TOLERANCE, FLOAT32 = 1e-9, 1e-5
LAYERS = 2
GENERATOR_BYTES = 5056
"""The state of torch's generator, which torch saves where attention is recomputed, whether that draws or not."""


def recomputing(prepared: Prepared, axes: dict[str, int], zero: int) -> tuple[Candidate, Candidate, Candidate]:
    """A plan that saves all, that recomputes whole blocks, and single operations."""
    plain = drawn_candidate(prepared.graph, mesh_of(**axes), 1, zero=zero, wild=0.0, precision=F64)
    whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    return plain, whole, with_kept(prepared.graph, plain, Cluster.parse(f"local:{plain.mesh.size}"), 1, share=0.3)


@dataclass
class Counting:
    """A backend without a hash, which counts what it compiles."""

    graphs: int = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


def compilations(cases: list[Case]) -> tuple[list[tuple[int, int, bool]], list[str]]:
    """On a rank, where a code is compiled once at most: the graphs of each training, those of its copy too, whether a call
    without gradients, which would be compiled apart, has the same loss; and what was said."""
    found = list[tuple[int, int, bool]]()
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=1):
        warnings.simplefilter("always")
        for text, state, batch in cases:
            torch._dynamo.reset()
            backend = Counting()
            parallel = parallel_model(text, state, compile=backend)
            loss = parallel(**batch)
            loss.backward()
            trained = backend.graphs
            copy.deepcopy(parallel)(**batch).backward()
            copied = backend.graphs
            with torch.no_grad():
                found.append((trained, copied, torch.allclose(parallel(**batch), loss)))
    return found, [str(each.message) for each in caught if "not compiled" in str(each.message)]


def saved_bytes(text: str, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], backend: str) -> dict[str, int]:
    """On a rank: bytes that each block saves for the backward beside parameters, in the storages of all of its calls, handles of
    calls that are not traced too; and, under ``+`` and its name, those in host memory or in parts."""
    torch._dynamo.reset()
    parallel = parallel_model(text, state, compile=backend)
    own = {parameter.untyped_storage().data_ptr() for parameter in parallel.program.parameters()}
    saved: dict[str, int] = {}

    def watched(name: str, forward: Any) -> Any:
        def run(*args: Any) -> Any:
            seen = set(own)

            def pack(x: torch.Tensor) -> torch.Tensor:
                storage = x.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    saved[name] = saved.get(name, 0) + storage.nbytes()
                return x

            def leave(recompute: Recompute, *error: object) -> None:
                for source in recompute.sources.values():
                    held = [getattr(source, name, None) for name in ("on_host", "share")]
                    saved["+" + name] = saved.get("+" + name, 0) + sum(x.nbytes for x in held if x is not None)
                for handle in itertools.chain.from_iterable(recompute.saved.values()):
                    pack(handle.get())
                exit(recompute, *error)

            def ride(operands: Any, x: torch.Tensor) -> Any:
                saved = on_handle(operands, x)
                return pack(saved) if isinstance(saved, torch.Tensor) else saved

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), pytest.MonkeyPatch.context() as patch:
                exit, on_handle = Recompute.__exit__, eager_call._Operands._pack
                patch.setattr(Recompute, "__exit__", leave)
                patch.setattr(eager_call._Operands, "_pack", ride)
                return forward(*args)

        return run

    for block in parallel.program.blocks():
        block.forward = watched(type(block).__name__, block.forward)  # type: ignore[method-assign]
    parallel(**batch).backward()
    return saved


def planned_bytes(prepared: Prepared, candidate: Candidate, name: str, priced_compiled: bool = False) -> float:
    """Bytes that a call of a block saves by its plan."""
    block, plan = prepared.graph.block(name), candidate.block(name)
    cluster = with_compilation(Cluster.parse(f"local:{candidate.mesh.size}"), priced_compiled)
    costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster)
    return sum(RecomputePlan.of(costs, plan).saved.values())


@pytest.mark.slow
@pytest.mark.parametrize("force", [{"dp": 2, "tp": 2, "zero": 3}], ids=["dp=2,tp=2,zero=3"])
def test_inductor_equals_one_process(force: dict[str, int], ranks: RankPool) -> None:
    prepared = prepare("llama", torch.float64)
    text = program(prepared, plan(prepared, force))
    (found,) = ranks.run(train_steps, [(text, prepared.state, prepared.batch, "inductor")], timeout=240)[0]
    loss, gradients, _ = found
    wrong = differences((loss, gradients, {}, {}), prepared.expected, TOLERANCE, parameters=False)
    assert not wrong, f"{wrong[:5]}\n{text}"


@pytest.mark.parametrize(
    ("backend", "axes", "zero", "plans"),
    [
        (PARTITIONED, {"dp": 1, "tp": 2}, 0, 1),
        SLOW(PARTITIONED, {"dp": 2, "tp": 2}, 3, 2),
        SLOW("inductor", {"dp": 2, "tp": 2}, 3, 2),
    ],
)
def test_recomputation_equals_one_process(backend: str, axes: dict[str, int], zero: int, plans: int, ranks: RankPool) -> None:
    """Recomputed conversions are collectives of the compiled backward. Nothing is left to run as it is."""
    prepared, world = prepare("llama"), prod(axes.values())
    texts = [program_text(prepared.graph, each) for each in recomputing(prepared, axes, zero)[-plans:]]
    assert "recompute(C.convert" in texts[-1]
    cases = [(text, prepared.state, prepared.batch) for text in texts]
    for outcomes, said in ranks.run(train_compiled, cases, backend, world=world, timeout=600):
        assert not said
        for text, outcome in zip(texts, outcomes, strict=True):
            wrong = differences(outcome, prepared.expected, TOLERANCE)
            assert not wrong, f"{wrong[:5]}\n{text}"


def test_what_is_recomputed_is_not_saved(ranks: RankPool) -> None:
    """Compiled layers save at most what the plan says, for all plans."""
    prepared = prepare("gpt2")
    saved = list[float]()
    for candidate in recomputing(prepared, {"dp": 2}, 0):
        text = program_text(prepared.graph, candidate)
        found = ranks.run(saved_bytes, text, prepared.state, prepared.batch, PARTITIONED, world=2, timeout=200)[0]["GPT2Block"]
        assert found <= LAYERS * (planned_bytes(prepared, candidate, "GPT2Block") + GENERATOR_BYTES)
        saved.append(found)
    assert saved[1] < saved[2] < 0.2 * saved[0]


@pytest.mark.parametrize(
    ("model", "layer", "force", "share"),
    [
        ("gpt2", "GPT2Block", {"dp": 2, "zero": 0}, 1.0),
        ("llama", "LlamaDecoderLayer", {"dp": 1, "tp": 2}, 0.8),
        SLOW("qwen3", "Qwen3DecoderLayer", {"dp": 1, "tp": 2}, 0.8),
        ("mixtral", "MixtralDecoderLayer", {"dp": 2, "zero": 0}, 0.9),
    ],
)
def test_plans_priced_as_compiled_say_what_is_saved(
    model: str, layer: str, force: dict[str, int], share: float, ranks: RankPool
) -> None:
    """Less than this `share` of what is saved in eager mode; experts save as much as there, and so do norms and gelu of torch."""
    prepared = prepare(model)
    result = plan(prepared, force, with_compilation(replace(Cluster.parse("dgx-h100:1"), size=2), True))
    text = program(prepared, result)
    found = ranks.run(saved_bytes, text, prepared.state, prepared.batch, PARTITIONED, world=2, timeout=200)[0][layer]
    eager, compiled = (LAYERS * planned_bytes(prepared, result.candidate, layer, each) for each in (False, True))
    assert compiled < share * eager
    assert found == pytest.approx(compiled + LAYERS * GENERATOR_BYTES, rel=0.02)


@pytest.mark.parametrize(("attention", "backend"), [(0.0, PARTITIONED), (0.1, PARTITIONED), SLOW(0.1, "inductor")])
def test_recomputed_random_numbers_are_those_of_the_forward(attention: float, backend: str, ranks: RankPool) -> None:
    """GPT-2 with dropout, with attention's own too."""
    prepared = prepare_dropout(attn_pdrop=attention)
    plain, whole, _ = recomputing(prepared, {"dp": 2}, 0)
    some = with_replays(prepared.graph, plain, 0, 1.0, offload=0.0)
    texts = [program_text(prepared.graph, each) for each in (plain, whole, some)]
    assert "recompute(C.dropout" in texts[2] and ("C.attention_dropout, " in texts[2]) == bool(attention)
    cases = [(text, prepared.state, prepared.batch) for text in texts]
    ((first, *others), said), _ = ranks.run(train_compiled, cases, backend, world=2, timeout=300)
    eager, _ = ranks.run(train_compiled, cases[:1], "", world=2, timeout=300)[0]
    for found, text in zip((first, *others), texts, strict=True):
        assert not differences(found, eager[0], FLOAT32), text  # transformers' loss is that of float32 logits
    assert not said


def test_a_distinct_block_is_compiled_once(ranks: RankPool) -> None:
    """Prologue, layers and epilogue, in a copy of the model too. Beyond torch's limit of compilations blocks run as they are."""
    prepared = prepare("gpt2")
    cases = [(program_text(prepared.graph, each), prepared.state, prepared.batch) for each in recomputing(prepared, {"dp": 2}, 0)]
    for found, said in ranks.run(compilations, cases, world=2, timeout=200):
        assert found == [(3, 3, True)] * 3
        assert len(said) >= 4 and all("recompile_limit" in line for line in said)


def test_split_backwards_that_recompute_are_not_compiled_and_said(ranks: RankPool) -> None:
    prepared = prepare("gpt2")
    candidate = pipeline_candidate(prepared, {}, Pipeline(2, 1, "zb-h1"), 4)
    candidate = replace(candidate, blocks=tuple(replace(block, recompute=True) for block in candidate.blocks))
    cases = [(candidate_text(prepared, candidate), prepared.state, prepared.batch)]
    for _, said in ranks.run(train_compiled, cases, PARTITIONED, world=2, timeout=200):
        assert any("weight gradients have actions of their own" in line for line in said)


@pytest.mark.parametrize(("model", "backend"), [("gpt2", PARTITIONED), SLOW("llama", PARTITIONED), SLOW("gpt2", "inductor")])
def test_what_is_offloaded_or_in_parts_is_not_on_the_device(model: str, backend: str, ranks: RankPool) -> None:
    """Each rank holds on the device and elsewhere what the plan says, and has the numbers of one process."""
    prepared = prepare(model)
    local = with_compilation(Cluster.parse("local:2"), True)
    planned = plan(prepared, {"dp": 1, "tp": 2}, with_compilation(replace(Cluster.parse("dgx-h100:1"), size=2), True))
    candidate = with_kept(prepared.graph, planned.candidate, local, 1, share=0.8, offload=0.4)
    candidate = with_partition(prepared.graph, candidate, local, "tp")
    text = program_text(prepared.graph, candidate)
    assert "recompute.offload(" in text and "recompute.partition(" in text and "recompute(" in text
    (outcome, said), _ = ranks.run(train_compiled, [(text, prepared.state, prepared.batch)], backend, world=2, timeout=400)
    assert not differences(outcome[0], prepared.expected, TOLERANCE) and not said
    found = ranks.run(saved_bytes, text, prepared.state, prepared.batch, backend, world=2, timeout=400)[0]
    for block in prepared.graph.blocks:
        name, times, each = block.name, prepared.graph.count(block.name), candidate.block(block.name)
        costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, local)
        by_plan = RecomputePlan.of(costs, each)
        elsewhere = sum(by_plan.offloaded.values()) + sum(by_plan.saved[storage] / 2 for storage in by_plan.partitioned)
        gone = sum(by_plan.offloaded.values()) + sum(by_plan.saved[storage] for storage in by_plan.partitioned)
        assert found["+" + name] == times * elsewhere
        assert found.get(name, 0) <= times * (1.03 * (sum(by_plan.saved.values()) - gone) + GENERATOR_BYTES)


def calls_without_gradients(
    text: str, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], backend: str
) -> tuple[list[str], float, int]:
    """On a rank: what is said where a compiled model is called without gradients, too; the difference of the gradients of two
    calls and twice those of one; and how many offloaded tensors are left."""
    torch._dynamo.reset()
    parallel = parallel_model(text, state, compile=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            parallel(**batch)
        (parallel(**batch) + parallel(**batch)).backward()
        both = full_gradients(parallel)
        for parameter in parallel.parameters():
            parameter.grad = None
        with torch.no_grad():
            parallel.eval()(**batch)
        parallel.train()(**batch).backward()
    once = full_gradients(parallel)
    gc.collect()
    left = sum(type(each) in (OffloadedTensor, OffloadedCall) for each in gc.get_objects())
    said = [str(each.message) for each in caught if "not compiled" in str(each.message)]
    return said, max(float((both[name] - 2 * gradient).abs().max()) for name, gradient in once.items()), left


def offloading_programs(prepared: Prepared) -> Iterator[str]:
    """Programs that keep tensors on the host, of plans drawn one after the other."""
    for seed in range(100):
        plain = drawn_candidate(prepared.graph, mesh_of(dp=2), seed, zero=0, wild=0.3, precision=F64)
        candidate = with_kept(prepared.graph, plain, Cluster.parse("local:2"), seed, share=0.6, offload=0.5)
        text = program_text(prepared.graph, candidate)
        if "recompute.offload(" in text:
            yield text


@pytest.mark.parametrize("model", ["llama", SLOW("gpt2"), SLOW("qwen3")])
def test_calls_without_gradients_between_steps(model: str, ranks: RankPool) -> None:
    """No operation is tagged where nothing is recomputed, and conversions of two tensors (GPT-2 has none) have their contexts."""
    prepared = prepare(model)
    text = next(each for each in offloading_programs(prepared) if "C.convert_many((" in each or model == "gpt2")
    found = ranks.run(calls_without_gradients, text, prepared.state, prepared.batch, PARTITIONED, world=2, timeout=200)
    for said, difference, left in found:
        assert not said and difference < TOLERANCE and left == 0


def second_backwards(text: str, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> list[Any]:
    """On a rank: gradients of the step after a second backward was refused, and half of those of two where none is."""
    torch._dynamo.reset()
    parallel = parallel_model(text, state, compile="aot_eager")
    parallel(**batch).backward()
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        parallel(**batch).backward(retain_graph=True)
    for parameter in parallel.parameters():
        parameter.grad = None
    parallel(**batch).backward()
    after = full_gradients(parallel)
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        parallel = parallel_model(text, state, compile="aot_eager")
        loss = parallel(**batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return [after, {name: gradient / 2 for name, gradient in full_gradients(parallel).items()}]


def test_a_second_backward_is_refused_or_right(ranks: RankPool) -> None:
    """As the page says; the step after it has its gradients."""
    prepared = prepare("gpt2")
    plain = drawn_candidate(prepared.graph, mesh_of(dp=2), 0, zero=3, wild=0.0, precision=F64)
    text = program_text(prepared.graph, plain)
    for found in ranks.run(second_backwards, text, prepared.state, prepared.batch, world=2, timeout=200):
        for gradients in found:
            wrong = differences((prepared.expected.loss, gradients, {}, {}), prepared.expected, TOLERANCE, parameters=False)
            assert not wrong, wrong[:5]


def compiled_tensor_parallelism(text: str, state: Mapping[str, torch.Tensor], backend: str) -> float:
    """On a rank, beside a parallel model: the difference of a user's own DTensor module compiled and not."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallel_model(text, state)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(module, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)
    x = torch.randn(4, 3, 8, requires_grad=True)
    gradients = []
    for run in (module, torch.compile(module, backend=backend, fullgraph=True)):
        x.grad = None
        run(x).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    return float((gradients[0] - gradients[1]).abs().max())


def test_a_module_of_the_user_compiles_beside_a_parallel_model(ranks: RankPool) -> None:
    """What autopar teaches DTensor does not end the tracing of other DTensor code."""
    prepared = prepare("gpt2")
    text = program_text(prepared.graph, drawn_candidate(prepared.graph, mesh_of(dp=2), 1, zero=0, wild=0.0, precision=F64))
    for difference in ranks.run(compiled_tensor_parallelism, text, prepared.state, PARTITIONED, world=2, timeout=200):
        assert difference < FLOAT32


def cache_lookups(
    text: str, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], folder: str
) -> list[dict[str, int]]:
    """On a rank: what AOTAutograd's cache in a folder answers in each of two starts."""
    from torch._dynamo.utils import counters

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            parallel_model(text, state, compile="inductor")(**batch).backward()
            found.append({key: count for key, count in counters["aot_autograd"].items() if key.startswith("autograd_cache")})
    return found


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path, ranks: RankPool) -> None:
    """Conversions are functions of autograd, which torch caches only where it is told to. Of a first start each graph is compiled
    by the rank that comes to it first."""
    prepared = prepare("llama")
    text = program(prepared, plan(prepared, {"dp": 2, "zero": 3, "tp": 2}))
    starts = ranks.run(cache_lookups, text, prepared.state, prepared.batch, str(tmp_path), timeout=400)
    misses = [sum(start.get("autograd_cache_miss", 0) for start in each) for each in zip(*starts, strict=True)]
    assert misses == [text.count("(BlockModule):"), 0] and sum(second["autograd_cache_hit"] for _, second in starts) > 0
