"""Gradients, and numbers of DTensors, are those of the whole tensor on every rank."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from support.harness.rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.runtime.compat.modules import profiling
from autopar.runtime.errors import StateError
from autopar.runtime.patches import apply_patches
from autopar.runtime.state.gradient import Gradient, as_gradient, hooked, own
from autopar.runtime.state.weight_source import fill_missing, named_state


def reductions() -> list[tuple[str, float, bool]]:
    """For each reduction: its error as a number, and whether a gradient gives an ordinary tensor."""
    apply_patches()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    full = torch.randn(8, 6, dtype=torch.float64)
    plain = distribute_tensor(full, mesh, [Shard(0)])
    gradient = as_gradient(plain, "w")
    out = []
    for name, reduce in {
        "norm": torch.norm,
        "vector_norm": torch.linalg.vector_norm,
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.max,
    }.items():
        value = reduce(gradient)
        error = abs(reduce(plain).item() - reduce(full).item()) + abs(float(value) - reduce(full).item())
        out.append((name, error, type(value) is torch.Tensor))
    rows = torch.norm(gradient, dim=0, keepdim=True).square_()
    assert torch.allclose(rows.full_tensor(), full.norm(dim=0, keepdim=True) ** 2)
    return out


def test_reductions_are_whole(ranks: RankPool) -> None:
    for found in ranks.run(reductions, world=2):
        assert all(error < 1e-12 and ordinary for _, error, ordinary in found), found


def kept() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    own(parameter, None, "w")
    assert not hooked(parameter)
    (parameter * 2).sum().backward()
    assert isinstance(parameter.grad, Gradient) and isinstance(parameter.grad, DTensor)
    assert type(parameter.grad.norm()) is torch.Tensor
    assert isinstance(parameter.grad.view(-1), Gradient) and type(parameter.grad + 1) is DTensor
    parameter.register_hook(lambda gradient: gradient)
    assert hooked(parameter)


def test_autograd_keeps_gradients_whole(ranks: RankPool) -> None:
    ranks.run(kept, world=2)


def test_profiling_is_seen() -> None:
    assert not profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiling()


class Rotary(nn.Module):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)


class Model(nn.Module):
    """Tied weights, and a rotary module; initialised as Hugging Face's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.rotary = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False), Rotary()
        self.head.weight = self.words.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.frequencies.copy_(Rotary().frequencies)


def test_a_meta_model_finds_its_buffers() -> None:
    state = Model().state_dict()
    del state["head.weight"]  # as in a file of tied weights
    with torch.device("meta"):
        model = Model()
    tensors = named_state(model, state)
    fill_missing(model, tensors)
    assert torch.equal(tensors["rotary.frequencies"], Rotary().frequencies)
    assert tensors["head.weight"] is state["words.weight"] and model.rotary.frequencies.is_meta
    del Model._init_weights
    with pytest.raises(StateError, match=r"rotary.frequencies is on the meta device, and no checkpoint has it"):
        fill_missing(model, named_state(model, state))
    with pytest.raises(StateError, match="words.weight is on the meta device and has no values"):
        fill_missing(model, named_state(model, {}))


def test_the_buffers_of_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    expected = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = named_state(model, expected.state_dict())
    fill_missing(model, tensors)
    for name, buffer in expected.named_buffers():
        assert torch.equal(tensors[name], buffer), name


def numbers_travel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gradient = as_gradient(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "w")
    norm = gradient.norm()
    assert norm.item() == pytest.approx(2.0)
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    parameter.grad = gradient
    again = copy.deepcopy(parameter).grad  # as of an optimizer or a model that is copied before zero_grad
    assert isinstance(again, Gradient) and again.norm().item() == pytest.approx(2.0)
    assert again.to_local().data_ptr() != gradient.to_local().data_ptr()
    file = io.BytesIO()
    torch.save({"norm": norm}, file)
    assert torch.load(io.BytesIO(file.getvalue()))["norm"].item() == pytest.approx(2.0)


def test_numbers_of_a_gradient_can_be_saved(ranks: RankPool) -> None:
    ranks.run(numbers_travel, world=2)
