"""Experts that are placed anew between steps: training, states and checkpoints equal those of the single process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.harness.comparison import different_numbers, different_tensors
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import full_gradients, graph_state, parallel_model, train
from support.models.model_families import GROUPED, families, hugging_face
from support.models.routed_mlp import RoutedMlp, routed_batch
from support.models.small_models import make_case, token_batch
from support.plans.expert_forms import text_of
from support.plans.pipeline_plans import candidate_text, pipeline_candidate
from torch import Tensor

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.ir.plan import Pipeline
from autopar.runtime.checkpoint.entry import load_checkpoint
from autopar.verification.single import LiftCasts, lift_casts

STEPS = 6
SKEWED = ((90.0, 80.0, 1.0, 2.0, 30.0, 3.0, 4.0, 5.0), (1.0, 60.0, 3.0, 60.0, 70.0, 60.0, 2.0, 3.0))
"""Loads of eight experts: ranks with neighbours would have most of it."""


@cache
def eight_experts() -> tuple[Prepared, Any]:
    """A Mixtral with eight experts in each of two layers, and the model itself."""
    options = dict(num_local_experts=8, num_experts_per_tok=2, output_router_logits=True)
    model, inputs = make_case(hugging_face("MixtralForCausalLM", token_batch, **options, **GROUPED), batch=16)
    graph = lift_casts(capture(model, (), inputs, compute_dtype="float64"))
    return Prepared("mixtral", graph, graph_state(graph, model), inputs, None), model  # type: ignore[arg-type]


def batches_of(prepared: Prepared) -> list[dict[str, Tensor]]:
    """Another batch in each step: the examples in another order, with the labels of others."""
    return [
        {key: x.roll(step, 0) if key != "labels" else x.roll(2 * step, 0) for key, x in prepared.batch.items()}
        for step in range(STEPS)
    ]


def trained_alone(model: torch.nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The losses, the gradients of each step, and the states at the end, of one process."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients: list[dict[str, Tensor]] = []
    with LiftCasts():
        losses, _, state = train(model, batches, optimizer, after_backward=lambda _: gradients.append(full_gradients(model)))
    state = {name: state[name] for name, _ in model.named_parameters()}
    return dict(losses=losses, gradients=gradients, state=state, optimizer=optimizer.state_dict())


def rebalanced_on_rank(
    text: str, state: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]], loads: Sequence[Any], folder: str = "",
    backend: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Two steps, the first loads, two steps, the second loads, two steps."""
    parallel = parallel_model(text, state, compile=backend)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    gradients: list[dict[str, Tensor]] = []
    moved = []

    def batches_between_moves() -> Iterator[Mapping[str, Tensor]]:
        for step, batch in enumerate(batches):
            if step in (2, 4):
                moved.append(parallel.rebalance_experts(loads[step // 2 - 1], optimizer, steps=None))
            yield batch

    losses, _, whole = train(
        parallel, batches_between_moves(), optimizer, after_backward=lambda _: gradients.append(full_gradients(parallel))
    )
    if folder:
        parallel.save(folder, optimizer, step=STEPS)
    found = dict(losses=losses, gradients=gradients, state=whole, moved=moved)
    return found | dict(optimizer=parallel.full_optimizer_state(optimizer))


def differences_of(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    out = different_numbers("loss", found["losses"], expected["losses"], 1e-9)
    for step, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        out += different_tensors(f"gradient {step}", mine, theirs, 1e-9, noise=1e-3)
    own = {name: x for name, x in found["state"].items() if name in expected["state"]}
    out += different_tensors("state", own, expected["state"], 1e-9)
    for key in ("exp_avg", "exp_avg_sq"):
        mine, theirs = (
            {list(each["state"])[number]: values[key] for number, values in each["optimizer"]["state"].items()}
            for each in (found, expected)
        )
        out += different_tensors(key, mine, theirs, 1e-9, noise=1e-6)
    return out


PLANS = {
    "ep=2": ("dispatched, ep=2", {}),
    "dp=2,ep=2,zero=3": ("dispatched, dp=2,ep=2", {}),
    "dp=2,ep=2,zero=0": ("dispatched, dp=2,ep=2", {"zero": 0}),
    "dp=2,ep=2,zero=2": ("dispatched, dp=2,ep=2", {"zero": 2}),
    "ep=4": ("dispatched, ep=4", {}),
    "tp=4": ("owned, tp=4", {}),
    "ep=2,tp=2": ("dispatched, ep=2,tp=2", {}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_as_before(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    prepared, model = eight_experts()
    form, further = PLANS[plan]
    text, batches = text_of(prepared, form, **further), batches_of(prepared)
    expected = trained_alone(model, batches)
    loads = [[each, each[::-1]] for each in SKEWED]
    world = 2 if plan == "ep=2" else 4
    for found in ranks.run(rebalanced_on_rank, text, prepared.state, batches, loads, str(tmp_path), world=world, timeout=300):
        wrong = differences_of(found, expected)
        assert not wrong, f"{plan}: {wrong[:5]}"
        assert [len(each.layers) for each in found["moved"]] == [2, 2]
        assert all(each.imbalance[1] < 0.8 * each.imbalance[0] for each in found["moved"])
    resumed = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(resumed.parameters())
    assert load_checkpoint(tmp_path, resumed, optimizer) is not None
    alone = dict(state=dict(resumed.named_parameters()), optimizer=optimizer.state_dict(), losses=[], gradients=[])
    assert not differences_of(alone, expected | dict(losses=[], gradients=[]))
    other = text_of(prepared, "owned, tp=4" if plan == "ep=4" else "dispatched, ep=4")
    for found in ranks.run(loaded_on_rank, other, prepared.state, str(tmp_path)):
        assert not differences_of(found, expected | dict(losses=[], gradients=[]))


def loaded_on_rank(text: str, state: Mapping[str, Tensor], folder: str) -> dict[str, Any]:
    parallel = parallel_model(text, {name: torch.zeros_like(each) for name, each in state.items()})
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.load(folder, optimizer)
    full = parallel.full_optimizer_state(optimizer)
    return dict(losses=[], gradients=[], state=parallel.full_state(), optimizer=full)


@pytest.mark.parametrize("plan", ["ep=4", pytest.param("tp=4", marks=pytest.mark.slow)])
def test_compiled_programs(plan: str, ranks: RankPool) -> None:
    """Experts change places between calls of compiled code."""
    prepared, model = eight_experts()
    text, batches = text_of(prepared, PLANS[plan][0]), batches_of(prepared)
    expected, loads = trained_alone(model, batches), [[each, each[::-1]] for each in SKEWED]
    for found in ranks.run(rebalanced_on_rank, text, prepared.state, batches, loads, "", "aot_eager", timeout=300):
        assert not (wrong := differences_of(found, expected)), wrong[:5]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(schedule: str, ranks: RankPool) -> None:
    """Each stage moves the experts of its own layers; loads are given by hand."""
    prepared, model = prepare("deepseek_v3"), deepseek()
    text = candidate_text(prepared, pipeline_candidate(prepared, {"tp": 2}, Pipeline(2, 1, schedule), 4))
    batches, layers = batches_of(prepared), text.count("C.moe_experts_owned(")
    expected = trained_alone(model, batches)
    assert layers
    loads = [[each] * 2 for each in SKEWED]
    for found in ranks.run(rebalanced_on_rank, text, prepared.state, batches, loads, timeout=300):
        wrong = differences_of(found, expected)
        assert not wrong, wrong[:5]
        assert [len(each.layers) for each in found["moved"]] == [2, 2]


def deepseek() -> torch.nn.Module:
    return make_case(families()["deepseek_v3"], torch.float64, 16)[0]


def routed(seed: int = 0) -> RoutedMlp:
    torch.manual_seed(seed)
    return RoutedMlp(number=8).double()


def routed_batch_of(size: int) -> dict[str, Tensor]:
    torch.manual_seed(size)
    return {key: x.double() if x.is_floating_point() else x for key, x in routed_batch(size).items()}


def routed_parallel(model: RoutedMlp, zero: int = 0) -> Any:
    pins, force = {name: {"ep": "S(0)"} for name in ("up", "down", "up_bias", "down_bias")}, f"dp=2,ep=2,zero={zero}"
    return autopar.parallelize(model, "local:4", routed_batch_of(8), force=force, constrain=pins, cache=False)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str = "state") -> None:
    assert not (wrong := different_tensors(kind, found, expected, 1e-9)), wrong[:5]


def refused(words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except AutoparError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def script_on_rank(folder: str, zero: int) -> None:
    """A user's script, beside the plain model."""
    plain = routed()
    parallel = routed_parallel(routed(), zero)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (parallel, plain))

    def step(size: int = 8, between: Callable[[], Any] = lambda: None) -> None:
        for number, model in enumerate((parallel, plain)):
            model(**routed_batch_of(size)).backward()
            if not number:
                between()
            model(**routed_batch_of(size + 8)).backward()
        same(parallel.full_gradients(), {name: p.grad for name, p in plain.named_parameters()}, "gradient")
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
        same(parallel.full_state(), dict(plain.named_parameters()))

    def evaluate(size: int) -> None:
        with torch.no_grad():
            found, expected = parallel(**routed_batch_of(size)), plain(**routed_batch_of(size))
        assert abs(found.item() - expected.item()) < 1e-9 * expected.abs().item()

    step()
    evaluate(6)
    with parallel.expert_load() as before:
        evaluate(8)
    step(between=lambda: parallel.rebalance_experts([SKEWED[0]], mine, steps=None))  # between accumulated gradients
    with parallel.expert_load() as after:
        parallel(**routed_batch_of(8))
    assert parallel._expert_placement.orders and sum(after[0].by_expert) == sum(before[0].by_expert)
    chosen = plain.gate(plain.norm(routed_batch_of(8)["x"])).topk(2, -1).indices
    assert after[0].by_expert == tuple(torch.bincount(chosen.flatten(), minlength=8).tolist())
    order = parallel._expert_placement.orders["up"]
    assert after[0].by_rank[0] + after[0].by_rank[2] == sum(after[0].by_expert[expert] for expert in order[:4])
    for size in (6, 8, 7):  # programs from before, and a new one
        evaluate(size)
    plain(**routed_batch_of(8)).backward()
    parallel(**routed_batch_of(8)).backward()
    for read in (lambda x: x, lambda x: x.data, lambda x: x.detach()):
        found = {"up": read(parallel.up).full_tensor(), "grad": read(parallel.up.grad).full_tensor()}
        same(found, {"up": plain.up, "grad": plain.up.grad})
    parallel.zero_grad()
    plain.zero_grad()
    same(copy.deepcopy(parallel).full_state(), dict(plain.named_parameters()))

    # what has the order of the ranks is refused, and goes after restore_experts
    refused("restore_experts()", parallel.state_dict)
    refused("restore_experts()", mine.state_dict)
    late = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    late.state.update(mine.state)
    plain(**routed_batch_of(8)).backward()
    parallel(**routed_batch_of(8)).backward()
    refused("restore_experts()", late.step)
    parallel.zero_grad()
    plain.zero_grad()

    # states go in and out while experts are placed anew
    parallel.save(folder, mine, step=1)
    assert parallel._expert_placement.orders
    fresh = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    files = parallel.save_pretrained(f"{folder}/weights")
    same(safetensors.torch.load_file(files / "model.safetensors"), dict(plain.named_parameters()))
    parallel.load_full_state(dict(routed(1).state_dict()))
    same(parallel.full_state(), routed(1).state_dict())
    parallel.load_pretrained(files)
    same(parallel.full_state(), dict(plain.named_parameters()))
    parallel.up.data = routed(1).up.data
    same({"up": parallel.up.full_tensor()}, {"up": routed(1).up})
    assert parallel.load(folder, fresh).step == 1
    same(parallel.full_state(), dict(plain.named_parameters()))
    mine = fresh
    step()
    fresh = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.load_full_optimizer_state(fresh, copy.deepcopy(theirs.state_dict()))
    mine = fresh
    step()
    parallel.restore_experts()
    assert not parallel._expert_placement.orders and set(parallel.state_dict()) == set(plain.state_dict())
    assert mine.state_dict()["state"]
    step()

    # an optimizer that was forgotten
    parallel.rebalance_experts([SKEWED[0]], steps=None)
    parallel(**routed_batch_of(8)).backward()
    refused("pass it to parallel.rebalance_experts", mine.step)
    parallel.zero_grad()
    parallel.restore_experts()
    step()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_script_with_accumulation_evaluation_and_states(zero: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(script_on_rank, str(tmp_path), zero, timeout=300)
