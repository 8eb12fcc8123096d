"""The containers of a parallel model answer as those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.run = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 8))
        self.norms = nn.ModuleDict({"first": nn.LayerNorm(8)})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8))})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self.norms["first"](x)) * self.gains[0] * self.gains[1] + self.named["shift"]
        return x + y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare, self.none = nn.Linear(2, 2), None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Table(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self["last"](self["first"](x))
        return y


def roots() -> list[Any]:
    layers = [nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)]
    return [nn.Sequential(*layers), Table({"first": layers[0], "last": layers[2]})]


def shapes(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


def frozen(model: Any) -> list[str]:
    model.blocks[:2].requires_grad_(False)
    names = [name for name, each in model.named_parameters() if not each.requires_grad]
    model.blocks[:2].requires_grad_(True)
    return names


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "index": lambda model: (isinstance(model.blocks[-1].run[0], nn.Linear), len(model.blocks), len(model.blocks[0].run)),
    "slice": lambda model: [name for name, _ in model.blocks[0].run[::3].named_parameters()],
    "classes": lambda model: [
        (type(each).__name__, type(each) == nn.Linear, type(each) in (nn.LayerNorm, nn.Tanh), type(each) in {nn.Linear: 0})  # noqa: E721
        for each in list(model.modules())[1:]
    ],
    "classes of a slice": lambda model: [type(each) == nn.Linear for each in model.blocks[0].run[1:]],  # noqa: E721
    "kinds of a slice": lambda model: [isinstance(each, nn.Linear) for each in model.blocks[0].run[1:]],
    "slice of a list": lambda model: (isinstance(model.blocks[1:], nn.ModuleList), len(model.blocks[1:])),
    "freeze a slice": frozen,
    "keys": lambda model: (list(model.blocks[0].norms), list(model.blocks[0].norms.keys()), "first" in model.blocks[0].norms),
    "items": lambda model: [(key, isinstance(each, nn.LayerNorm)) for key, each in model.blocks[0].norms.items()],
    "reversed": lambda model: [isinstance(each, Block) for each in reversed(model.blocks)],
    "parameter list": lambda model: (
        len(model.blocks[0].gains),
        shapes(model.blocks[0].gains),
        shapes(model.blocks[0].gains[:1]),
    ),
    "parameter dict": lambda model: (
        list(model.blocks[0].named),
        shapes(model.blocks[0].named.values()),
        "x" in model.blocks[0].named,
    ),
    "parameter by key": lambda model: model.blocks[0].named["shift"] is dict(model.named_parameters())["blocks.0.named.shift"],
    "no bias": lambda model: (model.blocks[0].run[0].bias is None, model.blocks[0].run[3].bias is None),
    "none": lambda model: model.none,
    "words": lambda model: repr(model.blocks[0].run),
}


ROOT_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "items": lambda model: (len(model), bool(model), shapes(model[list(model)[0] if "first" in model else 0].parameters())),
    "order": lambda model: [each if isinstance(each, str) else isinstance(each, nn.Linear) for each in model],
    "in": lambda model: ("first" in model, "x" in model),
    "keys": lambda model: "first" in model and (list(model.keys()), len(model.values())),
    "slice": lambda model: "first" not in model and [isinstance(each, nn.Tanh) for each in model[:2]],
    "backward": lambda model: "first" not in model and [isinstance(each, nn.Tanh) for each in reversed(model)],
}


def parallel_of(plain: nn.Module, x: Tensor) -> Any:
    return autopar.parallelize(copy.deepcopy(plain), "local:1", (x,), cache=False)


def differences() -> list[str]:
    """Of the answers to each question; what is no container has no items."""
    plain, x = Stack(), torch.ones(4, 8)
    parallel = parallel_of(plain, x)
    assert torch.equal(parallel.spare.weight.full_tensor(), plain.spare.weight)
    assert not any(hasattr(parallel, name) for name in ("__len__", "__iter__", "__getitem__"))
    models = [(root, copy.deepcopy(parallel_of(root, x))) for root in roots()]
    found = [name for name, ask in ROOT_QUESTIONS.items() for root, each in models if ask(each) != ask(root)]
    with pytest.raises(autopar.errors.StateError, match="was replaced, added or deleted"):
        models[0][1].append(nn.Tanh())
    late = autopar.parallelize(roots()[0], "local:1", cache=False)  # built by its first call
    late(x)
    assert len(late) == 3
    return [name for name, ask in QUESTIONS.items() if ask(parallel) != ask(plain)] + found


def test_containers_answer_as_those_of_the_plain_model(ranks: RankPool) -> None:
    assert ranks.run(differences, world=1) == [[]]


class Seeing(nn.Linear):
    """Has an entry of its own in the state dict."""

    seen = 1

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def extra_states() -> list[int]:
    parallel = parallel_of(nn.Sequential(Seeing(8, 2)), torch.ones(4, 8))
    other = copy.deepcopy(parallel)
    other.load_full_state(other.full_state() | {"0._extra_state": {"seen": 7}})
    return [each.full_state()["0._extra_state"]["seen"] for each in (parallel, other)]


def test_a_copy_has_extra_state_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(extra_states, world=1) == [[1, 7]]


class Tied(Stack):
    """With a weight that has two names, and a buffer and parameters that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again.weight = self.head.weight
        self.register_buffer("marks", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(torch.tanh(self.head(x))))


class Shared(Tied):
    """With a block that is there twice, a module in two blocks, and a tied weight before a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, self.blocks[0])
        self.blocks[3].run[3] = self.blocks[2].run[3]
        self.again.bias = nn.Parameter(torch.ones(8))
        del self.spare


def names_of(model: Any) -> list[Any]:
    """The parameters of the model and of its parts by name, and which of them are one."""
    parts = [model, model.again, *model.blocks, model.blocks[3].run[3]]
    once = [[name for name, _ in part.named_parameters()] for part in parts]
    every = [(name, each) for part in parts for name, each in part.named_parameters(remove_duplicate=False)]
    own, saved = [name for name, _ in model.again.named_parameters(recurse=False)], list(model.again.state_dict())
    first = {id(each): name for name, each in reversed(every)}
    return [once, [(name, first[id(each)]) for name, each in every], own, saved, len(list(model.modules()))]


def names_of_shared() -> None:
    plain = Shared()
    parallel = parallel_of(plain, torch.ones(4, 8))
    assert names_of(parallel) == names_of(plain)
    for model in (plain, parallel):
        model.again.requires_grad_(False)
        model.blocks[1].eval()
    assert names_of(parallel) == names_of(plain)
    assert not parallel.head.weight.requires_grad and not parallel.blocks[0].run.training


def test_shared_modules_and_tied_parameters_are_there_under_each_name(ranks: RankPool) -> None:
    ranks.run(names_of_shared, world=1)


def other_states() -> None:
    """On a rank: a state in another dtype, with two values of a tied weight, is loaded as one process does; one with another
    shape is refused."""
    torch.manual_seed(0)
    plain, other = (Tied().double() for _ in range(2))
    parallel = parallel_of(plain, torch.ones(4, 8, dtype=torch.float64))
    state = {name: value.float() for name, value in other.state_dict().items()}
    state |= {"again.weight": 2 * state["again.weight"], "marks": state["marks"] + 1}
    for model in (plain, parallel):
        model.load_state_dict(state)
    for name, value in parallel.full_state().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=0)
    for name in ("marks", "spare.weight"):
        with pytest.raises(autopar.errors.StateError, match=f"{name} has shape"):
            parallel.load_state_dict(state | {name: torch.zeros(5)})


def test_states_are_loaded_as_by_one_process(ranks: RankPool) -> None:
    """What the forward does not use took the dtype of the state, and of tied names the first had the values, not the last."""
    ranks.run(other_states, world=1)


def conversions() -> None:
    """On a stage of a pipeline, of parts that it has, that the other one has and that no program uses."""
    x = torch.ones(4, 8)
    parallel = autopar.parallelize(Stack(), "local:2", (x,), force="pp=2", cache=False)
    expected = parallel(x).item()
    for part in (parallel, parallel.blocks[0], parallel.blocks[1:], parallel.blocks[2].gains[:1], parallel.spare):
        for same in (part.to("cpu"), part.float(), part.cpu(), part.to(x), part.to_empty(device="cpu")):
            assert same is part
        changes = partial(part.to, torch.bfloat16), part.double, partial(part.to, "meta"), partial(part.type, torch.float64)
        for change in (*changes, partial(part._apply, torch.Tensor.clone)):
            with pytest.raises(autopar.errors.StateError, match=r"\A(a parallel model (keeps|stays)|_apply would make).*\Z"):
                change()
    assert parallel.blocks[0].run[1].double() is not None and parallel(x).item() == expected


def test_conversions_are_refused_where_they_change_something(ranks: RankPool) -> None:
    """Those of a part made tensors that no program reads, and ended in an error of torch where they change nothing."""
    ranks.run(conversions, world=2)


class Counting(Stack):
    def trained(self) -> int:
        return sum(each.numel() for each in self.parameters() if each.requires_grad)

    def freeze(self) -> int:
        for each in self.blocks[0].parameters():
            each.requires_grad_(False)
        return self.trained()


def test_methods_count_what_trains_now(ranks: RankPool) -> None:
    ranks.run(counts, world=1)


def counts() -> None:
    plain: Any = Counting()
    parallel = parallel_of(plain, torch.ones(4, 8))
    for model in (plain, parallel):
        model.blocks[1].requires_grad_(False)
    assert parallel.trained() == plain.trained()
    assert parallel.freeze() == plain.trained() - sum(each.numel() for each in plain.blocks[0].parameters())
    assert not any(each.requires_grad for each in parallel.blocks[0].parameters())


def test_methods_of_libraries(ranks: RankPool) -> None:
    """Those that count answer; one that the plan has the place of is refused with that."""
    ranks.run(library_methods, world=2)


def library_methods() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=8, vocab_size=16, use_cache=False)
    plain, ids = transformers.GPT2LMHeadModel(config), torch.ones(4, 8, dtype=torch.long)
    parallel: Any = autopar.parallelize(plain, "local:2", {"input_ids": ids, "labels": ids}, force="pp=2,dp=1", cache=False)
    assert parallel.num_parameters() == parallel.num_parameters(True) == plain.num_parameters()
    assert parallel.get_memory_footprint() == plain.get_memory_footprint()
    with pytest.raises(AttributeError, match="leave it out, the plan decides what is recomputed"):
        parallel.gradient_checkpointing_enable()
    parallel.transformer.h[1].requires_grad_(False)
    plain.transformer.h[1].requires_grad_(False)
    assert parallel.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)
