"""Canonical parameters: names, placements, checkpoints that move between plans, mixed precision, bad input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.harness.rank_pool import RankError, RankPool
from support.harness.training_loop import sgd, train
from support.models.handwritten_program import batch, make, model
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.errors import BatchError, LaunchProblem, RuntimeProblem, StateError
from autopar.runtime.module import BlockModule, ParameterSpec, Program
from autopar.runtime.parallel import Parallel
from autopar.runtime.state.layout import dtensor_placements, model_shard, zero_dim, zero_shard
from autopar.runtime.state.layout import gather_full as undo

PLANS = [({"dp": 4}, 0), ({"dp": 4}, 3), ({"tp": 4}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 2, "tp": 2}, 0)]
GROUPED = [({"dp": 4, "state": 2}, 3), ({"dp": 4, "state": 2}, 1), ({"dp": 4, "state": 1}, 2)]
"""Two copies of the state on two neighbours each; one on every rank."""


def views(axes: dict[str, int], zero: int, state: dict[str, torch.Tensor]) -> Any:
    parallel = Parallel(make(axes, zero), state)
    whole = {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in parallel.state_dict().items()}
    stored = {name: (value.to_local().numel(), str(value.placements)) for name, value in parallel.named_parameters()}
    names = sorted(get_model_state_dict(parallel))
    parallel.load_full_state({name: value + 1 for name, value in state.items()})
    moved = parallel.full_state()
    loss = parallel(**batch(0)).item()
    return whole, stored, names, moved, loss


@pytest.mark.parametrize(("axes", "zero"), PLANS + GROUPED)
def test_state_dict_is_the_models(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    reference = model()
    state = {name: value.clone() for name, value in reference.state_dict().items() if name != "head.weight"}
    reference.load_state_dict({name: value + 1 for name, value in reference.state_dict().items()})
    expected = reference.train()(**batch(0)).item()
    for whole, _, names, moved, loss in ranks.run(views, axes, zero, state):
        assert whole.keys() == state.keys() and names == sorted(state)
        for name, value in state.items():
            assert torch.equal(whole[name], value) and torch.equal(moved[name], value + 1), name
        assert loss == pytest.approx(expected, rel=1e-12)


def test_what_each_rank_stores(ranks: RankPool) -> None:
    _, stored, *_ = ranks.run(views, {"dp": 2, "tp": 2}, 3, model().state_dict())[0]
    assert stored["layers.0.fused.weight"][0] == 24 * 8 // 4
    assert stored["embed.weight"][0] == 24 * 8 // 2
    assert stored["layers.0.scale"] == (1, "(Replicate(), Replicate())")
    assert stored["layers.1.norm.weight"] == (4, "(Shard(dim=0), Replicate())")
    _, stored, *_ = ranks.run(views, {"dp": 4, "state": 2}, 3, model().state_dict())[0]
    assert stored["layers.0.fused.weight"] == (24 * 8 // 2, "(Replicate(), Shard(dim=0))")
    assert stored["layers.0.scale"] == (1, "(Replicate(), Replicate())")


def save(axes: dict[str, int], zero: int, state: dict[str, torch.Tensor], path: str) -> float:
    parallel = Parallel(make(axes, zero), state)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    train(parallel, [batch(seed) for seed in range(2)], optimizer)
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return further(parallel, optimizer)


def resume(axes: dict[str, int], zero: int, state: dict[str, torch.Tensor], path: str) -> float:
    parallel = Parallel(make(axes, zero), {name: torch.zeros_like(value) for name, value in state.items()})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return further(parallel, optimizer)


def further(parallel: Parallel, optimizer: torch.optim.Optimizer) -> float:
    """The loss after one more step, which needs parameters, buffers and moments."""
    train(parallel, [batch(7)], optimizer)
    return parallel(**batch(8)).item()


MOVES = [(1, 3), (3, 2), (2, 1)]


@pytest.mark.parametrize(("before", "after"), [(PLANS[a], PLANS[b]) for a, b in MOVES] + [(PLANS[3], GROUPED[0]), GROUPED[:2]])
def test_checkpoint_moves_to_another_plan(ranks: RankPool, tmp_path: Path, before: Any, after: Any) -> None:
    state = copy.deepcopy(model().state_dict())
    saved = ranks.run(save, *before, state, str(tmp_path))
    resumed = ranks.run(resume, *after, state, str(tmp_path))
    assert resumed == pytest.approx(saved, rel=1e-12)


def half(axes: dict[str, int], zero: int, state: dict[str, torch.Tensor]) -> Any:
    parallel = Parallel(make(axes, zero, ("bfloat16", "float64")), state)
    losses = train(parallel, [batch(0)] * 3, sgd(0.1)).losses
    return losses, {str(parameter.dtype) for parameter in parallel.parameters()}


@pytest.mark.parametrize(("axes", "zero"), [({"dp": 4}, 0), ({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 3)])
def test_half_precision_compute_keeps_master_parameters(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    reference = model()
    state = copy.deepcopy(reference.state_dict())
    expected = train(reference, [batch(0)] * 3, sgd(0.1)).losses
    for losses, dtypes in ranks.run(half, axes, zero, state):
        assert dtypes == {"torch.float64"}
        assert losses == pytest.approx(expected, rel=3e-2) and losses != pytest.approx(expected, rel=1e-9)


def local(axes: dict[str, int], state: dict[str, torch.Tensor]) -> Any:
    parallel = Parallel(make(axes, 0), state)
    whole, dp = batch(3), parallel.program.mesh.dp
    mine = {name: value.chunk(dp.size)[dp.coordinate] for name, value in whole.items()}
    picked = list(parallel.sampler(range(8), shuffle=False))  # type: ignore[arg-type]
    return parallel(parallel.local_batch(**mine)).item(), parallel(*whole.values()).item(), picked


def test_local_batches_and_sampler(ranks: RankPool) -> None:
    answers = ranks.run(local, {"dp": 2, "tp": 2}, model().state_dict())
    assert all(mine == pytest.approx(whole, rel=1e-12) for mine, whole, _ in answers)
    assert [picked for *_, picked in answers] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


def complaints(state: dict[str, torch.Tensor]) -> list[str]:
    parallel = Parallel(make({"dp": 4}, 0), state)
    out = []
    good = batch(0)
    for call, problem in (
        (lambda: parallel(**{name: value[:6] for name, value in good.items()}), BatchError),
        (lambda: parallel(ids=good["ids"]), BatchError),
        (lambda: parallel(**good, mask=good["ids"]), BatchError),
        (lambda: parallel.half(), StateError),
        (lambda: parallel.to("meta"), StateError),
        (lambda: Parallel(make({"dp": 4}, 0), {}), StateError),
        (lambda: Parallel(make({"dp": 4}, 0), {**state, "embed.weight": torch.zeros(3, 3)}), StateError),
        (lambda: MeshHandle({"dp": 2, "tp": 4}), LaunchProblem),
        (lambda: parallel.sampler(range(8), lengths=[1] * 8), RuntimeProblem),
        (lambda: parallel.sampler(range(8), batch_size=8), RuntimeProblem),  # type: ignore[call-overload]
        (lambda: parallel.sampler(range(8), lengths=[1] * 8, batch_size=6), RuntimeProblem),
    ):
        try:
            call()
            out.append("nothing raised")
        except problem as error:
            out.append(str(error))
    assert parallel.to("cpu") is parallel
    return out


def test_bad_input_is_one_clear_line(ranks: RankPool) -> None:
    for lines in ranks.run(complaints, model().state_dict()):
        assert [line for line in lines if "\n" in line or line == "nothing raised"] == []
        told = ["multiple of 4", "misses labels", "unplanned mask", 'precision="bf16"']
        told += ["the devices of its cluster", "has no", "shape (3, 3)", "8 processes"]
        told += ["give batch_size=", "give lengths= too", "a multiple of 4"]
        for line, words in zip(lines, told, strict=True):
            assert words in line


class Odd(BlockModule):
    """Things that FSDP2 refuses: two dtypes, a 0-d parameter, a first dimension that does not divide."""

    specs = (
        ParameterSpec("a", (6, 5), "float64"),
        ParameterSpec("b", (5,), "float32"),
        ParameterSpec("c", (), "float64"),
        ParameterSpec("d", (3,), "float64"),
        ParameterSpec("e", (7, 3), "float64", trainable=False),
        ParameterSpec("unused", (4,), "float64"),
    )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a + self.b.double()) * self.c).sum() + (self.d * x[:, :3]).sum() + self.e.sum()


class OddProgram(Program):
    input_placements = {"x": {"dp": "S(0)"}}

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        self.odd = Odd(mesh, "odd")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from autopar.runtime import collectives as C

        return C.convert(self.odd(x), self.mesh.dp, "P -> I")


def odd(zero: int) -> Any:
    program = OddProgram(MeshHandle({"dp": 4}))
    program.odd.zero = zero
    state = {f"odd.{spec.path}": torch.ones(spec.shape) for spec in Odd.specs}
    parallel = Parallel(program, state)
    x = torch.arange(48.0, dtype=torch.float64).view(8, 6)
    for _ in range(2):
        parallel(x).backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in parallel.named_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_leftovers(ranks: RankPool, zero: int) -> None:
    x = torch.arange(48.0, dtype=torch.float64).view(8, 6)
    for gradients in ranks.run(odd, zero):
        torch.testing.assert_close(gradients["odd.a"], 2 * x.sum(0).unsqueeze(1).expand(6, 5))
        torch.testing.assert_close(gradients["odd.b"], torch.full((5,), 16.0))
        torch.testing.assert_close(gradients["odd.c"], 2 * (5 * x.sum() + 40))
        torch.testing.assert_close(gradients["odd.d"], 2 * x[:, :3].sum(0))
        assert gradients["odd.e"] is None and (gradients["odd.unused"] is None or gradients["odd.unused"].eq(0).all())


LAYOUTS = [
    {"dp": 2, "tp": 2}, {"dp": 1, "tp": 2, "tp2": 2}, {"dp": 2, "tp": 2, "tp2": 2},
]  # fmt: skip
STORED = [
    {}, {"tp": "S(0)"}, {"tp": "S(1)"}, {"tp": "S(0,3)"}, {"tp": "S(0,2)"},
    {"tp": "S(0)", "tp2": "S(0)"}, {"tp": "S(0)", "tp2": "S(1)"},
    {"tp": "S(0)", "tp2": "S(0,6)"}, {"tp": "S(1,3)", "tp2": "S(0)"}, {"tp": "S(0,3)", "tp2": "S(0,3)"},
]  # fmt: skip


def layouts(axes: dict[str, int], zero: bool) -> list[str]:
    """Stored pieces that do not come back as the whole through DTensor, or through a checkpoint's chunks."""
    from torch.distributed.tensor import DTensor

    from autopar.runtime.patches import apply_patches

    apply_patches()
    mesh, bad = MeshHandle(axes), []
    whole = torch.arange(24.0 * 12).view(24, 12)
    for stored in STORED:
        dim = zero_dim(whole.shape, stored, mesh) if zero else None
        piece = model_shard(whole, stored, mesh)
        piece = zero_shard(piece, dim, mesh)
        placements = dtensor_placements(whole.shape, stored, mesh, dim)
        tensor = DTensor.from_local(piece.contiguous(), mesh.device_mesh, placements, shape=whole.shape, stride=whole.stride())
        if not torch.equal(undo(piece, whole.shape, stored, mesh, dim), whole):
            bad.append(f"{stored} {placements}: whole")
        simple = sum(size > 1 for size in axes.values()) < 3 and len(set(stored.values())) == len(stored)
        if simple and not torch.equal(tensor.full_tensor(), whole):
            bad.append(f"{stored} {placements}: DTensor")
        for item in tensor.__create_write_items__("w", tensor):
            chunk = item.tensor_data.chunk
            expected = whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
            if not torch.equal(tensor.__get_tensor_shard__(item.index), expected):
                bad.append(f"{stored} {placements}: checkpoint")
        if sum(c.sizes.numel() for c in tensor.__create_chunk_list__()) != piece.numel():
            bad.append(f"{stored} {placements}: chunks")
    dist.barrier()
    return bad


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("axes", LAYOUTS)
def test_every_layout_is_a_dtensor(ranks: RankPool, axes: dict[str, int], zero: bool) -> None:
    world = axes["dp"] * axes["tp"] * axes.get("tp2", 1)
    assert ranks.run(layouts, axes, zero, world=world) == [[]] * world


def crash(rank_that_fails: int) -> int:
    if dist.get_rank() == rank_that_fails:
        raise KeyError("on purpose")
    dist.barrier()
    return dist.get_rank()


def test_the_pool_survives_a_failing_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*on purpose"):
        ranks.run(crash, 1, world=2)
    assert ranks.run(crash, 9, world=2) == [0, 1]
    with pytest.raises(RankError, match="no answer"):
        ranks.run("tests/runtime/test_state.py:sleep", world=2, timeout=1)
    assert ranks.run(crash, 9, world=2) == [0, 1]


def sleep() -> None:
    import time

    time.sleep(600)
