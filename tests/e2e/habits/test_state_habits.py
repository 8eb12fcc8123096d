"""Habits around saving and loading (docs/habits.md), on real ranks."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.harness.habits import (  # noqa: F401
    cluster,
    equals_one_process,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.harness.training_loop import adamw, train
from support.models.habit_model import WIDTH, Net, batch, net
from torch import nn

import autopar


def save_state_dict(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    assert not warning_of(lambda: copy.deepcopy(parallel.state_dict()))
    return warning_of(lambda: torch.save({"model": parallel.state_dict(), "step": 3}, io.BytesIO()))


def save_full_state(plan: str) -> None:
    parallel, reference, fresh = parallel_of(net(), plan), net(), net("")
    for parameter in fresh.parameters():
        nn.init.ones_(parameter)
    for model in (parallel, reference):
        train(model, [batch()], adamw())
    state = parallel.full_state()
    file = io.BytesIO()
    torch.save(state, file)
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name))
    assert "scale" not in parallel.state_dict() and state["head.weight"] is state["words.weight"]


def load_plain_state_dict(plan: str) -> None:
    model = net()
    parallel = parallel_of(net(), plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    parallel.load_state_dict(model.state_dict())
    torch.testing.assert_close(parallel(**batch()).detach(), model(**batch()).detach())
    torch.testing.assert_close(parallel.full_state()["unused"], model.unused.detach())
    assert "misses unused" in refusal(lambda: parallel.load_state_dict({"head.weight": model.head.weight}))


def load_part_of_a_state_dict(plan: str) -> None:
    """What is there is loaded, tied weights by either name; the rest keeps its values, and both say which keys did not fit."""
    model, parallel = net(), parallel_of(net(), plan)
    part = {name: value * 0.5 for name, value in model.state_dict().items() if name in ("head.weight", "unused") or "up" in name}
    part["further"] = torch.ones(1)
    found, expected = parallel.load_state_dict(part, strict=False), model.load_state_dict(part, strict=False)
    assert sorted(found.missing_keys) == sorted(expected.missing_keys) and found.unexpected_keys == ["further"]
    for name, value in parallel.full_state().items():
        assert torch.equal(value, model.state_dict()[name]), name
    equals_one_process(parallel, model)


def save_optimizer_state(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    mine = adamw()(parallel)
    train(parallel, [batch()], mine)
    train(reference, [batch()], adamw())
    state = parallel.full_optimizer_state(mine)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1.0)
    theirs.load_state_dict(state)
    found = train(parallel, [batch(1)], mine).state
    expected = train(reference, [batch(1)], theirs).state
    for name in expected:
        if name in found:
            torch.testing.assert_close(found[name], expected[name])


def save_checkpoint(plan: str) -> None:
    """Saved by one parallel model, loaded by another and by the plain model; both go on as the first one does."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    parallel, again, plain = parallel_of(net(), plan), parallel_of(net(), plan), net()
    mine, theirs, one = adamw()(parallel), adamw(1.0)(again), torch.optim.AdamW(plain.parameters(), lr=1.0)
    train(parallel, [batch()], mine)
    assert parallel.load(folder[0], mine) is None
    parallel.save(folder[0], mine, step=1, extra={"epoch": 4}, keep=1)
    expected = train(parallel, [batch(1)], mine).state
    found = again.load(folder[0], theirs)
    assert found.step == 1 and found.extra == {"epoch": 4}
    for name, value in train(again, [batch(1)], theirs).state.items():
        assert torch.equal(value, expected[name]), name
    assert autopar.load_checkpoint(folder[0], plain, one) is not None
    for name, value in train(plain, [batch(1)], one).state.items():
        if name in expected:
            torch.testing.assert_close(value, expected[name])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def optimizer_round_trip(plan: str) -> None:
    """Saved and loaded on each rank, as a script that resumes under the same plan does."""
    parallel, reference = parallel_of(net(), plan), net()
    mine, theirs = adamw()(parallel), adamw()(reference)
    train(parallel, [batch()], mine)
    train(reference, [batch()], theirs)
    saved, fresh = mine.state_dict(), adamw(0.5)(parallel)
    fresh.load_state_dict(saved)
    found, expected = train(parallel, [batch(1)], fresh).state, train(reference, [batch(1)], theirs).state
    for name in found.keys() & expected.keys():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def resume_from_plain_states(plan: str) -> None:
    """Under another plan: the states of the plain model and its optimizers."""
    for make in (adamw(), lambda model: torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2)):
        parallel, reference = parallel_of(net(), plan), net()
        theirs, mine = make(reference), make(parallel)
        train(reference, [batch()], theirs)
        parallel.load_state_dict(reference.state_dict())
        parallel.load_full_optimizer_state(mine, copy.deepcopy(theirs.state_dict()))
        found, expected = train(parallel, [batch(1)], mine).state, train(reference, [batch(1)], theirs).state
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def load_plain_optimizer_state(plan: str) -> str:
    parallel, reference = parallel_of(net(), plan), net()
    reference(**batch()).backward()
    mine, theirs = torch.optim.AdamW(parallel.parameters()), torch.optim.AdamW(reference.parameters())
    theirs.step()
    one_step(parallel)
    own, given = mine.state_dict(), theirs.state_dict()["state"]
    places = dict(zip(dict(parallel.named_parameters()), range(len(own["param_groups"][0]["params"])), strict=False))
    order = [name for name, _ in reference.named_parameters()]
    own["state"] = {place: given[order.index(name)] for name, place in places.items() if order.index(name) in given}
    return refusal(lambda: (mine.load_state_dict(own), mine.step()))


def average_weights(plan: str) -> None:
    """`AveragedModel`, by its mean and as a moving one: it follows, evaluates, and leaves the model as it is."""
    swa = torch.optim.swa_utils
    for options in ({}, {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9), "use_buffers": True}):
        states, values = [], []
        for model in (parallel_of(net(), plan), net()):
            average, optimizer = swa.AveragedModel(model, **options), adamw(1e-2)(model)
            for seed in range(3):
                train(model, [batch(seed)], optimizer)
                average.update_parameters(model)
            with torch.no_grad():
                values += [float(average(**batch(7))), float(model(**batch(7)))]
            inner = average.module
            states.append(inner.full_state() if hasattr(inner, "full_state") else inner.state_dict())
        assert values[:2] == pytest.approx(values[2:], rel=1e-9) and values[0] != values[1]
        for name in states[1]:
            torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-9, atol=1e-9)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.linear(x)).relu()).square().mean()  # type: ignore[no-any-return]


def update_batch_norm(force: str) -> None:
    """The statistics of averaged weights; under a pipeline batch norm is refused."""
    if "pp=" in force:
        return
    torch.manual_seed(0)
    plain, inputs = Normalized().double(), [batch(seed)["x"] for seed in range(3)]
    parallel = autopar.parallelize(copy.deepcopy(plain), cluster(), (inputs[0],), force=force, cache=False)
    assert [name for name, _ in parallel.named_buffers()] == [name for name, _ in plain.named_buffers()]
    values = []
    for model in (parallel, plain):
        average, optimizer = torch.optim.swa_utils.AveragedModel(model), adamw(1e-2)(model)
        for x in inputs:
            model(x).backward()
            optimizer.step()
            average.update_parameters(model)
        torch.optim.swa_utils.update_bn(inputs, average)
        average.eval()
        with torch.no_grad():
            values.append(float(average(inputs[0])))
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def reset_modules(plan: str) -> None:
    """Each fold of a cross-validation begins with new weights."""
    parallel, reference = parallel_of(net(), plan), net()

    def reset(model: nn.Module) -> None:
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    train(parallel, [batch()], adamw())
    reset(parallel)
    reset(reference)
    assert not torch.equal(reference.head.weight, net().head.weight)
    equals_one_process(parallel, reference)


def meta_model(plan: str) -> None:
    """From a checkpoint without the buffer that is in none; its module computes it."""
    with torch.device("meta"):
        empty = net()
    parallel = parallel_of(empty, plan, state=net().state_dict())
    equals_one_process(parallel, net())


def meta_model_with_unknown_buffer(plan: str) -> str:
    with torch.device("meta"):
        empty = net()
        empty.register_buffer("scale", torch.ones(WIDTH), persistent=False)
    empty.__class__ = Unresettable
    return refusal(lambda: parallel_of(empty, plan, state=net().state_dict()))


def shared_folder() -> Path:
    """One folder for all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def pretrained_weights(plan: str) -> None:
    """From files without the buffer that is in none and with tied weights under one name; exported, and loaded once more."""
    folder, reference = shared_folder(), net()
    parallel_of(net(), plan).save_pretrained(folder / "first")
    with torch.device("meta"):
        empty = net()
    parallel = parallel_of(empty, plan, state=folder / "first")
    equals_one_process(parallel, reference)
    parallel.save_pretrained(folder / "second", max_shard_size="2KB")
    assert (folder / "second" / "model.safetensors.index.json").is_file()
    other = parallel_of(net(), plan)
    other.load_pretrained(folder / "second")
    expected = parallel.full_state()
    assert all(torch.equal(value, expected[name]) for name, value in other.full_state().items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def pretrained_weights_of_another_model(plan: str) -> str:
    folder = shared_folder()
    parallel = parallel_of(net(), plan)
    parallel.save_pretrained(folder)
    with torch.device("meta"):
        empty = net()
        empty.further = nn.Parameter(torch.zeros(3))
    return refusal(lambda: parallel_of(empty, plan, state=folder))


class Unresettable(Net):
    """A model that cannot initialise its buffer again."""

    reset_parameters = None  # type: ignore[assignment]
