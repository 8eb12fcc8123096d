"""Steps in several micro-batches on real processes equal the single process that takes the batch at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, check_programs, prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import parallel_model
from support.models.small_models import make
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.program.build import program_text

TOLERANCE = 1e-9
SLOW = partial(pytest.param, marks=pytest.mark.slow)
F64 = Precision("float64", "float64")


def planned(prepared: Prepared, zero: int, many: int, **axes: int) -> Candidate:
    drawn = drawn_candidate(prepared.graph, mesh_of(**axes), 1, zero=zero, wild=0.0, precision=F64)
    candidate = replace(drawn, micro_batches=many)
    verify_candidate(prepared.graph, candidate)
    return candidate


def text(name: str, zero: int, many: int, **axes: int) -> str:
    prepared = prepare(name)
    return program_text(prepared.graph, planned(prepared, zero, many, **axes))


@pytest.mark.parametrize("name", [SLOW("gpt2"), SLOW("llama"), "mlp", SLOW("vit")])
def test_equals_one_process(name: str, ranks: RankPool) -> None:
    """Loss, every gradient, and parameters after three steps; the labels have unevenly many ignored tokens."""
    prepared = prepare(name)
    wanted = [(0, 2, dict(dp=4, tp=1)), (1, 4, dict(dp=4, tp=1)), (2, 2, dict(dp=4, tp=1)), (3, 4, dict(dp=4, tp=1)),
              (3, 2, dict(dp=2, tp=2)), (0, 4, dict(dp=1, tp=4))]  # fmt: skip
    wanted = wanted[2:5] if name in ("llama", "vit") else wanted
    texts = [text(name, zero, many, **axes) for zero, many, axes in wanted]
    check_programs(ranks, prepared, texts, wanted)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_mixed_precision_adds_up_in_the_master_dtype(zero: int, ranks: RankPool) -> None:
    """bfloat16 over float32: sums of eight micro-batches keep what bfloat16 sums would lose (their step is 2 ** -8)."""
    prepared = prepare("mlp", torch.float32, batch=32)
    graph = capture(*_mlp(), compute_dtype="bfloat16")
    drawn = drawn_candidate(graph, mesh_of(dp=4), 1, zero=zero, wild=0.0, precision=Precision("bfloat16", "float32"))
    program = program_text(graph, replace(drawn, micro_batches=8))
    for found in ranks.run(train_programs, [(program, prepared.state, prepared.batch)], timeout=200)[0]:
        assert {gradient.dtype for gradient in found[1].values()} == {torch.float32}
        assert not differences(
            (found[0], found[1], {}, {}), (prepared.expected[0], prepared.expected[1], {}, {}), 0.02, parameters=False
        )


def _mlp() -> tuple[Any, ...]:
    model, inputs = make("mlp", torch.float32, 32)
    return model, (), inputs


def on_a_rank(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """One process of four: everything that a loop may do with the loss."""
    from autopar.runtime.errors import BatchError, RuntimeProblem

    parallel = parallel_model(text, state)
    out: dict[str, Any] = {}

    def gradients() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in parallel.full_gradients().items()}

    with torch.no_grad():
        loss = parallel(**batch)
    out["no_grad"] = loss.item(), loss.requires_grad, len(gradients())
    loss = parallel(**batch)
    out["before backward"] = len(gradients())
    loss.backward()
    out["once"] = gradients()
    (parallel(**batch) * 0.5).backward()
    out["one and a half"] = gradients()
    try:
        loss.backward()
    except RuntimeProblem as problem:
        out["again"] = str(problem)
    parallel.zero_grad()
    loss = parallel(**batch)
    with torch.no_grad():
        parallel(**batch)
    loss.backward()
    out["norm"] = parallel.clip_grad_norm_(0.1).item()
    out["clipped"] = gradients()
    direct = torch.autograd.grad(parallel(**batch), list(parallel.parameters()))
    out["direct"] = {n: parallel.state.full(n, g) for n, g in zip(dict(parallel.named_parameters()), direct, strict=True)}
    try:
        parallel(**{name: tensor[:4] for name, tensor in batch.items()})
    except BatchError as problem:
        out["small"] = str(problem)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.zero_grad()
    parallel(**batch).backward()
    with torch.no_grad():
        parallel(**batch)
    optimizer.step()
    parallel.eval()
    with torch.no_grad():
        out["stepped"] = parallel(**batch).item()
    out["eval"] = parallel(**batch).item()
    return out


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_any_training_loop(zero: int, ranks: RankPool) -> None:
    prepared = prepare("gpt2")
    loss, expected = prepared.expected[0], prepared.expected[1]
    results = ranks.run(on_a_rank, text("gpt2", zero, 2, dp=4, tp=1), prepared.state, prepared.batch, timeout=300)
    for found in (results[0], results[3]):
        assert found["no_grad"] == (pytest.approx(loss, rel=1e-12), False, 0)
        assert found["before backward"] == 0
        assert "call the model again" in found["again"]
        assert "multiple of 8" in found["small"]
        assert found["eval"] == pytest.approx(found["stepped"], rel=1e-12) != pytest.approx(loss, rel=1e-3)
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert found["norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
        for key, factor in (("once", 1.0), ("one and a half", 1.5), ("clipped", 0.1 / (norm.item() + 1e-6)), ("direct", 1.0)):
            scaled = {name: gradient * factor for name, gradient in expected.items()}
            assert not differences((loss, found[key], {}, {}), (loss, scaled, {}, {}), TOLERANCE, parameters=False), key


def test_drawn_plans_are_exact_or_refused(ranks: RankPool) -> None:
    """Strategies at random: what gathers the batch is refused, whatever else is planned gives gradients of the whole batch."""
    prepared = prepare("mlp")
    texts, refused = [], 0
    for seed in range(16):
        drawn = drawn_candidate(prepared.graph, mesh_of(dp=2, tp=2), seed, zero=seed % 4, wild=0.3, precision=F64)
        try:
            texts.append(program_text(prepared.graph, replace(drawn, micro_batches=2)))
        except PlanError as error:
            assert "it takes one micro-batch" in str(error)
            refused += 1
    assert refused and len(texts) > 2
    for program, found in zip(
        texts, ranks.run(train_programs, [(t, prepared.state, prepared.batch) for t in texts])[0], strict=True
    ):
        wrong = differences(found, prepared.expected, TOLERANCE)
        assert not wrong, f"{wrong[:3]}\n{program}"


def test_batch_norm_takes_one_micro_batch() -> None:
    prepared = prepare("convnet_bn")
    with pytest.raises(PlanError, match="writes statistics of the whole batch .* it takes one micro-batch"):
        text("convnet_bn", 0, 2, dp=4, tp=1)
    assert program_text(prepared.graph, planned(prepared, 0, 1, dp=4, tp=1))


def test_the_program_text_has_micro_batches() -> None:
    program = text("gpt2", 2, 4, dp=4, tp=1)
    assert "    micro_batches = 4\n" in program
    assert '    totals = {"count_valid": "sum"}' in program
    assert "def forward(self, input_ids, labels, count_valid):" in program
    assert "1 of 16 in the plan in 4 micro-batches" in program


def collectives(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[int, int]:
    """Gathers and reductions of FSDP2 in one step (its collectives are c10d's own; the program's are functional)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    parallel = parallel_model(text, state)
    parallel(**batch).backward()
    with Watch():
        parallel(**batch).backward()
    return seen.count("c10d::_allgather_base_"), seen.count("c10d::_reduce_scatter_base_")


def test_state_communication_is_the_predicted_one(ranks: RankPool) -> None:
    """Four groups (embedding, two layers, the rest) and three micro-batches. ZeRO-3 gathers each before forward and backward, but
    what a turn keeps; ZeRO-1 and 2 once; ZeRO-1 reduces once."""
    prepared = prepare("llama")
    prepared = replace(prepared, batch={name: tensor[:12] for name, tensor in prepared.batch.items()})
    groups, many = 4, 3
    gathers = {1: groups, 2: groups, 3: many * groups - (many - 1) + many * (groups - 1)}
    reduced = {1: groups, 2: many * groups, 3: many * groups}
    for zero in (1, 2, 3):
        drawn = drawn_candidate(replace(prepared.graph, batch=12), mesh_of(dp=4), 1, zero=zero, wild=0.0, precision=F64)
        program = program_text(prepared.graph, replace(drawn, micro_batches=many))
        (found, *_) = ranks.run(collectives, program, prepared.state, prepared.batch, timeout=200)
        assert found == (gathers[zero], reduced[zero]), zero
