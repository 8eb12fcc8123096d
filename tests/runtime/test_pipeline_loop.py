"""The loop is the user's also in pipeline stages; state goes in and out by original names, whole, on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.harness.comparison import differences
from support.harness.end_to_end import reference
from support.harness.rank_pool import RankError, RankPool
from support.harness.training_loop import parallel_model, train
from support.models.handwritten_pipeline import Model, batch, built_schedule, model, pipeline_text
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autopar.program.load import load_program
from autopar.runtime.errors import BatchError, LaunchProblem, RuntimeProblem, StateError
from autopar.runtime.parallel import Parallel
from autopar.runtime.state.weight_source import BroadcastSource, WeightSource

PLANS = [
    (pipeline_text(built_schedule("1f1b", 2, 2), 2, dp=2), "two stages"),
    (pipeline_text(built_schedule("zbv", 2, 2, 2, 3), 2, zero=3, dp=2), "V, ZeRO-3"),
]


def made(program: str, source: WeightSource, **options: Any) -> Parallel:
    return parallel_model(program, source, **options)


def state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model().state_dict().items() if name != "head.weight"}


def loop(program: str) -> dict[str, Any]:
    """Everything that a loop may do with the loss."""
    parallel = made(program, state())
    out: dict[str, Any] = {}

    def gradients() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in parallel.full_gradients().items()}

    with torch.no_grad():
        loss = parallel(**batch())
    out["look"] = loss.item(), loss.requires_grad, len(gradients()), parallel.trace()
    loss = parallel(**batch())
    out["before backward"] = len(gradients())
    loss.backward()
    out["once"] = gradients()
    (parallel(**batch()) * 0.5).backward()
    out["one and a half"] = gradients()
    try:
        loss.backward()
    except RuntimeProblem as problem:
        out["again"] = str(problem)
    parallel.zero_grad()
    first = parallel(**batch())
    second = parallel(**batch(1))
    with torch.no_grad():
        parallel(**batch())
    second.backward()
    parallel.zero_grad()
    first.backward()
    out["norm"] = parallel.clip_grad_norm_(0.1).item(), parallel.clip_grad_norm_(9.0, float("inf")).item()
    out["clipped"] = gradients()
    try:
        parallel(**batch(examples=6))
    except BatchError as problem:
        out["small"] = str(problem)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.zero_grad()
    parallel(**batch()).backward()
    optimizer.step()
    parallel.eval()
    with torch.no_grad():
        out["stepped"] = parallel(**batch()).item()
    out["eval"] = parallel(**batch()).item()
    return out


@pytest.mark.parametrize("program", [program for program, _ in PLANS], ids=[name for _, name in PLANS])
def test_the_loop_is_the_users(program: str, ranks: RankPool) -> None:
    loss, expected, *_ = reference(model(), batch(), False)
    one = model()
    one(**batch()).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    stepped = one(**batch()).item()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    top = max(gradient.abs().max().item() for gradient in expected.values()) * 0.1 / (norm + 1e-6)
    found = ranks.run(loop, program)
    for rank, out in enumerate(found):
        lines = load_program(program).Program.schedule
        forwards = tuple(word for word in lines[rank // 2].split() if "F" in word and "_" not in word)
        assert out["look"] == (pytest.approx(loss, rel=1e-12), False, 0, forwards)
        assert out["before backward"] == 0
        assert "call the model again" in out["again"] and "multiple of 4" in out["small"]
        assert out["norm"] == pytest.approx((norm, top), rel=1e-9)
        assert out["stepped"] == out["eval"] == pytest.approx(stepped, rel=1e-12)
        for key, factor in (("once", 1.0), ("one and a half", 1.5), ("clipped", 0.1 / (norm + 1e-6))):
            scaled = {name: gradient * factor for name, gradient in expected.items()}
            assert not differences((loss, out[key], {}, {}), (loss, scaled, {}, {}), 1e-9, parameters=False), key


class Counting:
    """A source that counts what it is asked for, and what lives of it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.asked = tensors, list[str]()

    def __call__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return BroadcastSource(self.tensors)(name)


def sources(program: str) -> Any:
    """Initialised differently on each rank, loaded, and with something missing."""
    torch.manual_seed(dist.get_rank())
    different = dict(Model().double().state_dict())
    source = Counting(different)
    parallel = made(program, source)
    whole = parallel.full_state()
    asked = source.asked
    source.asked = []
    parallel.load_full_state({name: tensor + 1 for name, tensor in state().items()})
    loss = parallel(**batch()).item()
    problems = []
    for bad in (lambda: made(program, {**state(), "layers.3.up.bias": torch.zeros(3)}), lambda: made(program, {})):
        try:
            bad()
            problems.append("")
        except StateError as problem:
            problems.append(str(problem))
    return whole, asked, loss, problems, sorted(parallel.state_dict()), {name: different[name] for name in whole}


@pytest.mark.parametrize("program", [program for program, _ in PLANS], ids=[name for _, name in PLANS])
def test_state_goes_in_and_out(program: str, ranks: RankPool) -> None:
    one = model()
    one.load_state_dict({name: tensor + 1 for name, tensor in one.state_dict().items()})
    loss = one(**batch()).item()
    found = ranks.run(sources, program)
    first = found[0][-1]
    names = set(state())
    for whole, asked, found_loss, problems, _, _ in found:
        assert whole.keys() == names
        assert all(torch.equal(whole[name], first[name]) for name in names)
        assert sorted(asked) == sorted(names) and asked == found[0][1]
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert "has no" in problems[1]
    assert any("layers.3.up.bias has shape (3,)" in problems[0] for _, _, _, problems, _, _ in found)
    assert all(set(mine) == names for *_, mine, _ in found)


def steps(parallel: Parallel, optimizer: torch.optim.Optimizer, seeds: range) -> float:
    train(parallel, [batch(seed) for seed in seeds], optimizer)
    return parallel(**batch(9)).item()


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Parameter groups by parameter: else each stage would write a list of its own names under one key."""


def save(program: str, path: str) -> float:
    parallel = made(program, state())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    steps(parallel, optimizer, range(2))
    weights, moments = get_state_dict(parallel, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    return steps(parallel, optimizer, range(2, 4))


def resume(program: str, path: str) -> float:
    parallel = made(program, {name: torch.zeros_like(tensor) for name, tensor in state().items()})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    weights, moments = get_state_dict(parallel, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    return steps(parallel, optimizer, range(2, 4))


@pytest.mark.slow
def test_checkpoints_move_between_stages(ranks: RankPool, tmp_path: Path) -> None:
    """Also to other cuts, to another placement, and to one stage."""
    one = pipeline_text(built_schedule("1f1b", 1, 2), 2, zero=1, dp=4)
    plans = [PLANS[0][0], PLANS[1][0], one, pipeline_text(built_schedule("1f1b", 4, 4), 4)]
    for before, after in zip(plans, plans[1:], strict=False):
        folder = tmp_path / str(plans.index(before))
        saved = ranks.run(save, before, str(folder))
        assert len(set(saved)) == 1 and ranks.run(resume, after, str(folder)) == pytest.approx(saved, rel=1e-10)


def misfits() -> list[str]:
    lines = built_schedule("1f1b", 2, 2)
    good = pipeline_text(lines, 2, dp=2)
    cases = [
        good.replace('"pp": 2', '"pp": 1').replace("'pp': 2", "'pp': 1").replace("'dp': 2", "'dp': 4"),
        good.replace("0SEND_F0", "0SEND_X0"),
        good.replace(str(lines), str((lines[0], lines[1].replace("1F", "0F")))),
    ]
    out = []
    for case in cases:
        try:
            made(case, state())(**batch())
            out.append("nothing")
        except (LaunchProblem, RuntimeProblem) as problem:
            out.append(str(problem))
    return out


def test_bad_programs_are_one_clear_line(ranks: RankPool) -> None:
    told = ("schedule is for 2 ranks", "'0SEND_X0' is not an action", "runs chunks [0]")
    for lines in ranks.run(misfits):
        for line, words in zip(lines, told, strict=True):
            assert words in line and "\n" not in line


def misfit() -> None:
    good = pipeline_text(built_schedule("1f1b", 2, 2), 2, dp=2)
    made(good.replace('lambda B: (B, S, H), "float64"', 'lambda B: (B, S, H + 1), "float64"', 1), state())(**batch())


def test_what_does_not_fit_the_boundary(ranks: RankPool) -> None:
    """The stage that makes it says so; nothing wrong is sent."""
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*chunk 0 makes \(4, 6, 8\) torch.float64"):
        ranks.run(misfit)


def lives(program: str) -> list[bool]:
    """Per micro-batch, whether what the first chunk sent still lives when its backward begins."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from autopar.runtime.pipeline.executor import StepState

    parallel, sent, found = made(program, state()), list[StorageWeakRef](), list[bool]()
    if parallel.program.mesh.pp.coordinate == 0:
        first = parallel.program.get_submodule("chunk_0")
        first.register_forward_hook(lambda _, given, results: sent.append(StorageWeakRef(results[0].untyped_storage())))
    given = StepState._result_gradients

    def look(self: StepState, key: tuple[int, int], count: int) -> Any:
        values = given(self, key, count)
        if sent:
            found.append(not sent[key[1]].expired())
        return values

    StepState._result_gradients = look  # type: ignore[method-assign]
    try:
        parallel(**batch()).backward()
    finally:
        StepState._result_gradients = given  # type: ignore[method-assign]
    return found


def test_what_is_sent_does_not_wait_for_the_backward(ranks: RankPool) -> None:
    """The last result of the first chunk is a sum, which nothing keeps."""
    assert ranks.run(lives, pipeline_text(built_schedule("1f1b", 2, 4), 4), world=2) == [[False] * 4, []]


def test_a_copy_has_weights_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(copied) == [(True, False)] * 4


def copied() -> tuple[bool, bool]:
    """Whether a copy gives the same loss, and another one after the first model changed."""
    first = made(PLANS[0][0], state())
    second = copy.deepcopy(first)
    with torch.no_grad():
        before = second(**batch())
        same = torch.equal(before, first(**batch()))
        for parameter in first.parameters():
            parameter.mul_(0.5)
        assert torch.equal(before, second(**batch()))
        return same, torch.equal(first(**batch()), second(**batch()))
