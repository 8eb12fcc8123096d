"""Habits of changing parameters, buffers and modules that are there (docs/habits.md), on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from support.harness.habits import equals_one_process, parallel_of, refusal, test_habit, test_habit_under_other_plans  # noqa: F401
from support.harness.training_loop import adamw, train
from support.models.habit_model import WIDTH, WORDS, batch, net
from torch import nn


def both(path: str) -> tuple[Any, nn.Module]:
    """The parallel model and one process, after a step."""
    models = parallel_of(net(), path), net()
    for model in models:
        train(model, [batch(5)], adamw())
    return models


def used(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that programs read; of a pipeline's stage its own."""
    return [(name, parameter) for name, parameter in model.named_parameters() if name != "unused"]


def edit_in_place(plan: str) -> None:
    parallel, reference = both(plan)
    for model in (parallel, reference):
        with torch.no_grad():
            for _, parameter in used(model):
                parameter.mul_(0.9).add_(0.01)
            if hasattr(model.scale, "device") and not model.scale.is_meta:  # of another stage of a pipeline
                model.scale *= 2
    equals_one_process(parallel, reference)


def set_data(plan: str) -> None:
    """To what is computed of the parameters, and to full tensors."""
    parallel, reference = both(plan)
    names = dict(parallel.named_parameters())
    for model in (parallel, reference):
        for _, parameter in used(model):
            parameter.data = parameter.data * 0.5 + 0.1
            parameter.data *= 1.5
    for model in (parallel, reference):  # averaged weights for an evaluation, and back; a swap
        backup = {name: parameter.data for name, parameter in used(model)}
        views = {name: parameter.detach().reshape(-1) for name, parameter in used(model)}
        for name, parameter in used(model):
            parameter.data = parameter.data * 0.25
            assert float(views[name].abs().max()) == float(backup[name].abs().max()) != float(parameter.abs().max())
        for name, parameter in used(model):
            parameter.data = backup[name]
        own = dict(used(model))
        for weight in (name for name in own if name.endswith("norm.weight")):
            a, b = own[weight], own[weight.replace("weight", "bias")]
            a.data, b.data = b.data, a.data
    values = torch.randn(WORDS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    if "words.weight" in names:
        parallel.words.weight.data = values
        assert "its .data was set to torch.float32" in refusal(lambda: setattr(parallel.words.weight, "data", values.float()))
    reference.words.weight.data = values
    equals_one_process(parallel, reference)


def parameters_to_vector_and_back(plan: str) -> None:
    parallel, reference = both(plan)
    utils = nn.utils
    for model in (parallel, reference):
        given = [parameter for _, parameter in used(model)]
        vector = utils.parameters_to_vector(given)
        utils.vector_to_parameters(vector * 0.9 + 0.01, given)
    equals_one_process(parallel, reference)


def assign_a_parameter(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    said = refusal(lambda: setattr(parallel.words, "weight", nn.Parameter(torch.zeros(WORDS, WIDTH, dtype=torch.float64))))
    first = next(module for module in parallel.modules() if "weight" in module._parameters)
    for do in (
        lambda: first.register_parameter("weight", nn.Parameter(torch.zeros(2))),
        lambda: nn.utils.parametrizations.weight_norm(first),
        lambda: delattr(parallel.head, "weight"),
        lambda: parallel.register_parameter("more", nn.Parameter(torch.zeros(2))),
    ):
        assert "was replaced, added or deleted" in refusal(do)
    equals_one_process(parallel, net())
    return said


def assign_past_setattr(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    parallel._parameters["more"] = nn.Parameter(torch.zeros(2))
    return refusal(lambda: parallel(**batch()))


def replace_the_head(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    said = refusal(lambda: setattr(parallel, "head", nn.Linear(WIDTH, WORDS)))
    for do in (
        lambda: parallel.layers.append(nn.Linear(WIDTH, WIDTH)),
        lambda: parallel.layers.__setitem__(0, nn.Identity()),
        lambda: setattr(parallel.layers[0], "norm", nn.Identity()),
        lambda: parallel.add_module("more", nn.Identity()),
        lambda: setattr(parallel.layers[0], "forward", lambda x: x),
    ):
        assert "was replaced, added or deleted" in refusal(do)
    return said


def tie_later(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    return refusal(lambda: setattr(parallel.layers[1].up, "weight", parallel.layers[0].up.weight))


def assign_a_buffer(plan: str) -> None:
    """In training and in what evaluates; another shape or dtype is refused."""
    parallel, reference = both(plan)
    for factor in (2.0, 3.0):
        for model in (parallel, reference):
            model.scale = torch.full((WIDTH,), factor, dtype=torch.float64)
        equals_one_process(parallel, reference)
    assert "has shape (16,), and (3,) was assigned" in refusal(lambda: setattr(parallel, "scale", torch.zeros(3)))
    assert "has shape (16,), and NoneType was assigned" in refusal(lambda: setattr(parallel, "scale", None))


def load_by_assigning(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    return refusal(lambda: parallel.load_state_dict(net().state_dict(), assign=True))


# -- the plain model


def edit_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    with torch.no_grad():
        model.layers[0].up.weight.zero_()
    return refusal(lambda: parallel(**batch()))


def edit_data_of_the_plain_model(plan: str) -> str:
    """No version counts it."""
    model = net()
    parallel = parallel_of(model, plan)
    equals_one_process(parallel, net(), steps=1)
    model.layers[0].up.weight.data.mul_(0.5)
    return refusal(lambda: parallel(**batch()))


def load_into_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    model.load_state_dict({name: value * 0.5 for name, value in net().state_dict().items()})
    said = refusal(lambda: parallel(**batch()))
    parallel.load_full_state(model.state_dict())
    equals_one_process(parallel, model)
    return said


def edit_a_buffer_of_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    model.scale.data = torch.zeros(WIDTH, dtype=torch.float64)
    return refusal(lambda: parallel(**batch()))


def evaluate_the_plain_model(plan: str) -> None:
    """The trained weights, in the plain model, now and then; and moved to another dtype."""
    model, reference = net(), net()
    parallel = parallel_of(model, plan)
    for _ in range(2):
        equals_one_process(parallel, reference, steps=1)
        model.load_state_dict(parallel.full_state())
        torch.testing.assert_close(model(**batch(3)), reference(**batch(3)))
    model.float()
    equals_one_process(parallel, reference, steps=1)
