"""Adapters by peft on real ranks: only they get gradients and state, those of one process; switched, merged, saved and loaded by
peft's own methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.harness.comparison import training_differences
from support.harness.end_to_end import plan
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, parallel_model, train
from support.models.small_models import make
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn

import autopar
from autopar.verification.single import LiftCasts, lift_casts


def settings(name: str, kind: str) -> Any:
    """A configuration of peft whose adapters are not what changes nothing."""
    peft = pytest.importorskip("peft")
    targets = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}[name]
    if kind == "ia3":
        return peft.IA3Config(target_modules=targets, feedforward_modules=targets[-1:], init_ia3_weights=False)
    return peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, use_dora=kind == "dora")


@cache
def adapted(name: str, kind: str = "lora") -> tuple[nn.Module, Case, dict[str, Tensor], Any]:
    """The model with adapters, its case, batch, and what one process makes of three steps."""
    peft = pytest.importorskip("peft")
    model, batch = make(name, torch.float64, 8)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, settings(name, kind)).double()
    case = case_of(model, (), batch)
    with LiftCasts():
        expected = train(model, [((), batch)] * 3)
    return model, Case(lift_casts(case.graph), case.state), batch, expected


def adapters_only(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """On a rank: training, the names that an optimizer has state of, and whether frozen parameters take part in anything."""
    parallel = parallel_model(text, state)
    found = train(parallel, [((), batch)] * 3)
    optimizer = torch.optim.AdamW(p for p in parallel.parameters() if p.requires_grad)
    parallel(**batch).backward()
    optimizer.step()
    names = {parameter: name for name, parameter in parallel.named_parameters()}
    frozen = [name for parameter, name in names.items() if not parameter.requires_grad and parameter.grad is not None]
    return found, sorted(names[parameter] for parameter in optimizer.state), frozen


@pytest.mark.parametrize(
    ("name", "kind", "force"),
    [
        ("gpt2", "lora", {"dp": 2, "tp": 2, "zero": 3, "pp": 1}),
        pytest.param("gpt2", "lora", {"dp": 2, "tp": 2, "zero": 0, "pp": 1}, marks=pytest.mark.slow),
        pytest.param("llama", "lora", {"dp": 2, "tp": 2, "zero": 3, "pp": 1}, marks=pytest.mark.slow),
        pytest.param("llama", "lora", {"pp": 2, "dp": 2, "zero": 0}, marks=pytest.mark.slow),
        *(
            pytest.param("llama", kind, force, marks=pytest.mark.slow)
            for kind in ("dora", "ia3")
            for force in ({"tp": 4, "pp": 1}, {"dp": 2, "tp": 2, "zero": 3, "pp": 1}, {"pp": 2, "dp": 2, "zero": 2})
        ),
    ],
    ids=str,
)
def test_only_adapters_train(name: str, kind: str, force: dict[str, int], ranks: RankPool) -> None:
    model, case, batch, expected = adapted(name, kind)
    trainable = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora_" in each or "ia3_" in each for each in trainable)
    mine: set[str] = set()
    for found, with_state, frozen in ranks.run(adapters_only, case.text(**force), case.state, batch, timeout=120):
        assert not training_differences(found, expected) and found[1].keys() == trainable and not frozen
        mine |= set(with_state)
    assert mine == trainable


class Mixer(nn.Module):
    """A residual block, of which the layers are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two of them between linear layers, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(8, 16), nn.ModuleList(Mixer() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def net_of_two_adapters() -> Any:
    import peft

    torch.manual_seed(0)
    kinds = {"first": ["up", "down"], "second": ["up"]}
    configs = {each: peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False) for each, names in kinds.items()}
    model = peft.get_peft_model(Net(), configs["first"], adapter_name="first")
    model.add_adapter("second", configs["second"])
    model.base_model.set_adapter(["first", "second"])
    return model.double()


def habits_of_peft(model: Any, folder: str, wait: Callable[[], None], merges: bool) -> list[float]:
    """The losses of a script that trains two adapters together and apart, looks at the base, merges, saves and loads."""
    import peft

    draw = torch.Generator().manual_seed(5)
    sizes = {"x": 8, "y": 4}
    batches = [{k: torch.randn(8, size, generator=draw, dtype=torch.float64) for k, size in sizes.items()} for _ in range(3)]
    losses = []

    def look() -> None:
        with torch.no_grad():
            losses.append(model(**batches[0]).item())

    def learn() -> None:
        losses.extend(train(model, batches, adamw(1e-2)).losses)

    learn()
    with model.disable_adapter():
        look()
    look()
    for name in ("second", "first"):
        model.set_adapter(name)
        learn()
    if merges:  # a stage of a pipeline has no values of the others
        model.merge_adapter()
        look()
        model.unmerge_adapter()
        look()
    model.save_pretrained(folder)
    wait()
    again = peft.PeftModel.from_pretrained(Net().double(), f"{folder}/first", adapter_name="first")
    again.load_adapter(f"{folder}/second", adapter_name="second")
    own = {name: each for name, each in net_of_two_adapters().state_dict().items() if "lora_" not in name}
    again.load_state_dict(own, strict=False)
    losses.append(again(**batches[0]).item())
    learn()
    return losses


def peft_on_ranks(force: str, folder: str) -> list[float]:
    batch = {name: torch.ones(8, size, dtype=torch.float64) for name, size in {"x": 8, "y": 4}.items()}
    parallel = autopar.parallelize(net_of_two_adapters(), "local:4", batch, force=force, cache=False)
    losses = habits_of_peft(parallel, folder, dist.barrier, "pp" not in force)
    parallel.load_pretrained(folder)
    with torch.no_grad():
        return [*losses, parallel(**batch).item(), *[each.sum().item() for each in parallel.full_state().values()]]


@pytest.mark.parametrize(
    "force", ["dp=2,tp=2,zero=3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp=4", "dp=4,zero=2", "pp=2,dp=2"))]
)
def test_methods_of_peft_do_what_they_do_in_one_process(force: str, tmp_path: Path, ranks: RankPool) -> None:
    pytest.importorskip("peft")
    expected = habits_of_peft(net_of_two_adapters(), str(tmp_path / "one"), lambda: None, "pp" not in force)
    found = ranks.run(peft_on_ranks, force, str(tmp_path / "four"), timeout=240)
    for each in found:
        assert each[: len(expected)] == pytest.approx(expected, rel=1e-9)
        assert each == pytest.approx(found[0], rel=1e-12)
    one, four = (load_file(tmp_path / name / "first" / "adapter_model.safetensors") for name in ("one", "four"))
    torch.testing.assert_close(four, one, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_frozen_state_is_priced_as_such(kind: str) -> None:
    """Moments and gradients are those of the adapters, and of all parameters where all train."""
    model, case, batch, _ = adapted("gpt2", kind)
    plain = make("gpt2", torch.float64, 8)[0]
    for module, captured in ((model, case), (plain, case_of(plain, (), batch))):
        trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        memory = dict(plan(captured, {"dp": 4, "tp": 1, "zero": 0, "pp": 1}).evaluation.memory)  # type: ignore[arg-type]
        assert memory["optimizer"] == pytest.approx(2 * trained, rel=0.01)
        assert memory["gradients"] <= 1.01 * trained


def base_of_another_dtype() -> Any:
    """Adapters in float64 on a base in float32, which is larger."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Net(), config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64 if parameter.requires_grad else torch.float32)
    return model


def shards_of_two_dtypes(batch: dict[str, Tensor]) -> Any:
    parallel = autopar.parallelize(base_of_another_dtype(), "local:4", batch, force="dp=4,zero=3", cache=False)
    held = {name: each.to_local().numel() / each.numel() for name, each in parallel.named_parameters()}  # type: ignore[attr-defined]
    return train(parallel, [batch] * 3).losses, held


def test_a_frozen_base_of_another_dtype_is_sharded_with_its_adapters(ranks: RankPool) -> None:
    """FSDP2 wants one dtype of what trains; whichever was smaller was replicated."""
    pytest.importorskip("peft")
    batch = {name: torch.randn(8, size, generator=torch.Generator().manual_seed(5)) for name, size in {"x": 8, "y": 4}.items()}
    expected = train(base_of_another_dtype(), [batch] * 3).losses
    for losses, held in ranks.run(shards_of_two_dtypes, batch, timeout=120):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(share == 0.25 for name, share in held.items() if ".layers." in name), held
