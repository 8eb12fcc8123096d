"""Every row of docs/habits.md on real ranks: what a training script does by habit equals one process, or is refused in the line
that the page quotes, or warned of."""

from __future__ import annotations

import copy
import gc
import io
import random
import re
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, full_gradients, train
from torch import Tensor, nn

import autopar

PAGE = Path(__file__).parents[3] / "docs" / "habits.md"
ROWS = {
    match[1]: (match[2], match[3] or "")
    for match in re.finditer(r"^\| `(\w+)` \|.*\| (right|refused|warned)(?:: `(.*)`)? \|$", PAGE.read_text(), re.MULTILINE)
}
SLOW = ("dp=4,zero=3", "pp=2,dp=2", "")
WIDTH, WORDS, BATCH = 16, 24, 16
Batch = dict[str, Tensor]


class Layer(nn.Module):
    """Normalisation and two linears; what varies between the models below."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.relu(self.up(self.norm(x))))
        if self.kind == "constant_dropout":
            h = nn.functional.dropout(h, 0.5)
        if self.kind == "branch" and self.training:
            h = h * 0.5
        return x + self.down(h)  # type: ignore[no-any-return]


class Net(nn.Module):
    """With tied and unused parameters, a non-persistent buffer, and attributes."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(width=WIDTH, kind=kind)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for _, parameter in self.named_parameters()) - self.words.weight.numel()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = x * self.scale + self.words(ids)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h), ids.roll(1, 1).flatten() if ids.dim() > 1 else (ids + 1) % WORDS)


def net(kind: str = "") -> Net:
    torch.manual_seed(0)
    return Net(kind).double()


def batch(seed: int = 0, size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, WORDS, (size,), generator=generator)}


# -- on a rank


def parallel_of(model: nn.Module, plan: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autopar.parallelize(model, "local:4", batch(), plan=plan, **options)


def equals_one_process(parallel: Any, reference: nn.Module, steps: int = 3, **options: Any) -> None:
    """Losses, gradients and state of the same steps."""
    batches = [batch(seed) for seed in range(steps)]
    found, expected = train(parallel, batches, adamw(), **options), train(reference, batches, adamw(), **options)
    trained = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=trained), expected)), wrong[:3]


def refusal(do: Callable[[], Any]) -> str:
    """What the error says that `do` raises."""
    try:
        do()
    except autopar.AutoparError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("not refused")


def warning_of(do: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return " ".join(str(each.message) for each in caught)


def one_step(parallel: Any, **given: Any) -> None:
    parallel(**(given or batch())).backward()


def optimizer_after(plan: str) -> None:
    equals_one_process(parallel_of(net(), plan), net())


def optimizer_before(plan: str) -> str:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    said = refusal(optimizer.step)
    del parallel
    gc.collect()
    optimizer.step()  # the hook is gone with the parallel model
    return said


def optimizer_before_with_closure(plan: str) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallel_of(model, plan)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = parallel(**batch())
        loss.backward()
        return loss

    return refusal(lambda: optimizer.step(closure))


def plain_model_beside(plan: str) -> None:
    model = net()
    equals_one_process(parallel_of(model, plan), model)


def global_batch(plan: str) -> None:
    equals_one_process(parallel_of(net(), plan, check_batch_every=2), net(), 5)


def different_batches(plan: str) -> str:
    parallel = parallel_of(net(), plan, check_batch_every=4)
    said = refusal(lambda: parallel(**batch(dist.get_rank())))
    for _ in range(3):
        one_step(parallel)
    assert said == refusal(lambda: parallel(**batch(dist.get_rank())))  # call 4 is one of four
    return said


def local_parts(plan: str) -> None:
    parallel, whole = parallel_of(net(), plan), batch()
    places = list(parallel.sampler(range(BATCH), shuffle=False))
    part = {name: tensor[places] for name, tensor in whole.items()}
    loss = parallel(parallel.local_batch(**part))
    loss.backward()
    reference = net()
    expected = reference(**whole)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in full_gradients(parallel).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


def different_local_parts(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    axes = {**parallel.program.mesh.axes, **parallel.program.mesh.pipeline_axes}
    if axes.get("dp") == 4:
        return ROWS["different_local_parts"][1]  # every rank has a part of its own
    part = batch(dist.get_rank(), BATCH // axes.get("dp", 1))
    return refusal(lambda: parallel(parallel.local_batch(**part)))


def one_rank_with_a_wrong_batch(plan: str) -> str:
    parallel, wrong = parallel_of(net(), plan), batch()
    if dist.get_rank() == 1:
        wrong["x"] = wrong["x"][:, :-1]
    said = refusal(lambda: parallel(**wrong))
    assert dist.get_rank() == 1 or "rank 1" in said and "was given another batch than this rank" in said
    return said if dist.get_rank() == 1 else ROWS["one_rank_with_a_wrong_batch"][1]


def model_in_eval_mode(plan: str) -> str:
    model = net("dropout").eval()
    said = warning_of(lambda: autopar.parallelize(model, "local:4", batch(), plan=plan))
    return said if dist.get_rank() == 0 else ROWS["model_in_eval_mode"][1]


def train_after_eval_mode(plan: str) -> str:
    parallel, reference = parallel_of(net("dropout").eval(), plan), net("dropout").eval()
    assert not parallel.training
    with torch.no_grad():
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
    return refusal(parallel.train)


def train_without_dropout(plan: str) -> None:
    equals_one_process(parallel_of(net().eval(), plan).train(), net())


def eval_with_dropout(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout"), plan), net("dropout")
    with torch.no_grad():
        in_training = parallel(**batch())
        for model in (parallel, reference):
            model.eval()
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
        parallel.train()
        assert abs(parallel(**batch()) - reference(**batch())) > 1e-4 < abs(in_training - reference(**batch()))


def refused_in_eval(kind: str, plan: str) -> str:
    parallel = parallel_of(net(kind), plan)
    one_step(parallel)
    parallel.eval()
    said = refusal(lambda: parallel(**batch()))
    parallel.train()
    one_step(parallel)
    return said


def eval_with_branch(plan: str) -> str:
    return refused_in_eval("branch", plan)


def eval_with_constant_dropout(plan: str) -> str:
    return refused_in_eval("constant_dropout", plan)


def eval_with_batch_norm(plan: str) -> str:
    return refused_in_eval("batch_norm", plan)


def frozen_before(plan: str) -> None:
    models = [net(), net()]
    for model in models:
        model.layers[0].requires_grad_(False)
    equals_one_process(parallel_of(models[0], plan), models[1])


def frozen_later(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    names = [name for name, _ in reference.named_parameters() if name.startswith("layers.0")]

    def freeze(model: nn.Module) -> Callable[[int], None]:
        own = dict(model.named_parameters())
        return lambda index: [own[name].requires_grad_(False) for name in names if name in own] and None if index == 0 else None

    batches = [batch(seed) for seed in range(3)]
    found = train(parallel, batches, adamw(), after_step=freeze(parallel))
    expected = train(reference, batches, adamw(), after_step=freeze(reference))
    state = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=state), expected)), wrong[:3]


def frozen_later_on_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    one_step(parallel)
    model.words.requires_grad_(False)
    return refusal(lambda: parallel(**batch()))


def unfrozen_later(plan: str) -> str:
    model = net()
    model.layers.requires_grad_(False)
    parallel = parallel_of(model, plan)
    for name, parameter in parallel.named_parameters():
        if name.startswith("layers."):
            parameter.requires_grad_(True)
    return refusal(lambda: parallel(**batch()))


def gradient_into_an_input(plan: str) -> str:
    given = batch()
    return refusal(lambda: parallel_of(net(), plan)(**{**given, "x": given["x"].requires_grad_()}))


def input_without_gradient(plan: str) -> None:
    given = batch()
    with torch.no_grad():
        found = parallel_of(net(), plan)(**{**given, "x": given["x"].clone().requires_grad_()})
        torch.testing.assert_close(found, net()(**given))


def noop(*args: Any) -> None:
    """A hook."""


def hook_of_a_module(plan: str) -> str:
    model = net()
    model.layers[1].up.register_forward_hook(noop)
    said = warning_of(lambda: autopar.parallelize(model, "local:4", batch(), plan=plan))
    assert dist.get_rank() or "layers.1.up" in said
    return said if dist.get_rank() == 0 else ROWS["hook_of_a_module"][1]


def hook_of_a_part(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    part = next(module for name, module in parallel.named_modules() if name.startswith("layers."))
    return refusal(lambda: part.register_forward_hook(noop))


def hook_of_a_parameter(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    for parameter in parallel.parameters():
        parameter.register_hook(noop)
    return refusal(lambda: parallel(**batch()))


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


def save_optimizer_state(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    mine = adamw()(parallel)
    train(parallel, [batch()], mine)
    train(reference, [batch()], adamw())
    if parallel.program.mesh.pp.size > 1:
        assert "torch.distributed.checkpoint" in refusal(lambda: parallel.full_optimizer_state(mine))
        return
    state = parallel.full_optimizer_state(mine)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1.0)
    theirs.load_state_dict(state)
    found = train(parallel, [batch(1)], mine).state
    expected = train(reference, [batch(1)], theirs).state
    for name in expected:
        if name in found:
            torch.testing.assert_close(found[name], expected[name])


def load_optimizer_state(plan: str) -> None:
    reference = net()
    theirs = adamw()(reference)
    train(reference, [batch()], theirs)
    parallel = parallel_of(reference, plan)
    mine = torch.optim.AdamW(parallel.parameters(), lr=1.0)
    if parallel.program.mesh.pp.size > 1:
        said = refusal(lambda: parallel.load_full_optimizer_state(mine, theirs.state_dict()))
        assert "torch.distributed.checkpoint" in said
        return
    parallel.load_full_optimizer_state(mine, theirs.state_dict())
    found = train(parallel, [batch(1)], mine).state
    expected = train(reference, [batch(1)], theirs).state
    for name in expected.keys() & found.keys():
        torch.testing.assert_close(found[name], expected[name])
    groups = [{"params": [parameter]} for parameter in parallel.parameters()]
    other = torch.optim.AdamW(groups)
    assert "parameter groups of" in refusal(lambda: parallel.load_full_optimizer_state(other, theirs.state_dict()))


def generate_without_method(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    return refusal(lambda: parallel.generate(batch()["ids"]))


def read_the_plan(plan: str) -> None:
    assert parallel_of(net(), plan).plan == autopar.Plan.from_json(Path(plan).read_text())


def draw_random_numbers(plan: str) -> None:
    model = net("dropout")
    torch.manual_seed(3 + dist.get_rank())
    random.seed(3)
    before = (torch.get_rng_state(), random.getstate())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def read_attributes(plan: str) -> None:
    parallel, model = parallel_of(net(), plan), net()
    assert parallel.config == model.config and parallel.config.width == WIDTH
    if len(parallel.state.index.specs) == len(parallel.state.parameters) + len(parallel.state.buffers):  # no pipeline
        assert parallel.parameter_count() == model.parameter_count() - WIDTH  # without `unused`
    with pytest.raises(AttributeError, match="has an attribute 'nothing'"):
        parallel.nothing  # noqa: B018


def free_the_plain_model(plan: str) -> None:
    model = net()
    parallel, seen = parallel_of(model, plan), weakref.ref(model.words.weight)
    del model
    gc.collect()
    assert seen() is None
    equals_one_process(parallel, net())


# -- here


def kind_of(habit: str) -> str:
    """The model whose plan a habit needs, and the mode that it is captured in."""
    kinds = {"eval_with_branch": "branch", "eval_with_constant_dropout": "constant_dropout", "eval_with_batch_norm": "batch_norm"}
    kinds |= {"eval_with_dropout": "dropout", "draw_random_numbers": "dropout", "train_without_dropout": "eval"}
    kinds |= {"model_in_eval_mode": "dropout eval", "train_after_eval_mode": "dropout eval", "frozen_before": "frozen 0"}
    return kinds.get(habit, "frozen 0 1" if habit == "unfrozen_later" else "")


@cache
def plan_of(kind: str, force: str) -> str:
    """The plan as text."""
    words = kind.split()
    model = net(words[0] if words and words[0] not in ("eval", "frozen") else "")
    if "eval" in words:
        model.eval()
    for number in words[1:] if words[:1] == ["frozen"] else ():
        model.layers[int(number)].requires_grad_(False)
    return autopar.plan(model, "local:4", batch(), force=force).to_json()


def on_rank(habit: str, plan: str) -> Any:
    return globals()[habit](plan)


def check(habit: str, force: str, ranks: RankPool, folder: Path) -> None:
    path = folder / "plan.json"
    path.write_text(plan_of(kind_of(habit), force))
    answer, line = ROWS[habit]
    for said in ranks.run(on_rank, habit, str(path)):
        if answer == "right":
            assert said is None
        else:
            assert line in said, said


def test_the_page_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) >= 30
    assert all(line for answer, line in ROWS.values() if answer != "right")


@pytest.mark.parametrize("habit", ROWS)
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(habit, "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", SLOW)
@pytest.mark.parametrize("habit", ROWS)
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(habit, force, ranks, tmp_path)
