"""What random models found (`test_random_models`), each as the least model that shows it, under plans that meet it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.fuzzing.models.compare import run_trials
from support.fuzzing.models.many import Tally, is_said_well
from support.fuzzing.models.trial import Trial, prepare
from support.fuzzing.models.writer import HEAD, Written
from support.harness.rank_pool import RankPool
from torch import Tensor

from autopar.ir.graph import Graph


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Finding:
    """Lines of ``__init__`` and of ``forward`` of ``a``, and the plans: degrees, ``drawn:`` for plans that no solver made."""

    made: str
    lines: str
    inputs: dict[str, Tensor]
    plans: Sequence[str] = ("tp=2", "dp=2", "drawn:tp=2")
    world: int = 2
    training: bool = True
    refused: str = ""
    seeds: Sequence[int] = field(default=(0, 1, 2))

    def written(self) -> Written:
        made, lines = (
            "".join(f"\n        {line.strip()}" for line in text.split(";") if line.strip()) for text in (self.made, self.lines)
        )
        text = f"class Model(nn.Module):\n    def __init__(self):\n        super().__init__(){made}\n"
        text += f"\n    def forward(self, {', '.join(self.inputs)}):{lines}\n"
        return Written(f"{HEAD}\n\n{text}", self.inputs, self.training, False, "rand" in text or "Dropout" in text)


FINDINGS = {
    # `squeeze()` of a shard of one took that dimension too: the removed dimensions are those of the whole tensor
    "squeeze": Finding(
        "self.m = nn.Linear(2, 2)", "v = self.m(a).squeeze(); return (v * v.cumsum(-1)).sum() / 4",
        {"a": normal(2, 2, 1, 2)}, ("dp=2", "drawn:tp=2", "drawn:dp=2"), seeds=range(6),
    ),
    "squeeze of one dimension": Finding(
        "self.m = nn.Linear(2, 2)", "v = self.m(a).squeeze(1).squeeze(0); return v.square().sum()",
        {"a": normal(2, 2, 2)}, ("dp=2", "drawn:tp=2", "drawn:dp=2"), seeds=range(6),
    ),
    # how many parts there are depends on the batch: the graph holds at the batch of the example
    "split of the batch": Finding(
        "self.m = nn.Linear(4, 4)", "return self.m(a).split(2)[0].square().sum()", {"a": normal(4, 4)}, ("tp=2", "dp=2"),
    ),
    # a size to which something is added does not divide where the batch does, and tells the batch to a block that has no other
    "random numbers of a padded batch": Finding(
        "self.m = nn.ModuleList([nn.BatchNorm1d(2)])",
        "v = F.pad(a, (0, 0, 1, 2)); w = self.m[0](v) - self.m[0](v * 0.5);"
        "return (w * (torch.rand(v.shape[0], 1, dtype=v.dtype) > 0.3)).square().sum()",
        {"a": normal(6, 2)}, ("dp=2", "", "drawn:dp=2"),
    ),
    # F.adaptive_avg_pool2d is stricter than its operation
    "adaptive pooling of two dimensions": Finding(
        "self.m = nn.Linear(4, 4)", "return F.adaptive_avg_pool2d(self.m(a), 1).square().sum()", {"a": normal(4, 4)},
    ),
    # parts of one coalesced gather had gaps, which torch's batch norm reads over in its backward
    "batch norm with weights of a coalesced gather": Finding(
        "self.l = nn.Linear(4, 4); self.m = nn.BatchNorm1d(4, track_running_stats=False); self.n = nn.LayerNorm(4)",
        "v = self.m(self.l(a)); return (self.n(v) * v.softmax(-1)).square().sum()",
        {"a": normal(4, 4)}, ("drawn:tp=2", "tp=2"), seeds=range(8),
    ),
    # the search said "though dp=1 x tp=2 fits: force its degrees", which it refuses as well
    "nothing to shard": Finding(
        "self.m = nn.PReLU()", "return self.m(a.flatten(1)).square().sum()", {"a": normal(1, 5, 1)}, ("",),
        refused="its batch of 1 is no multiple of 2",
    ),
    # halves of the batch: sizes that the batch does not multiply are captured at the batch of the example
    "halves of the batch": Finding(
        "self.m = nn.Linear(4, 4)", "x, y = self.m(a).chunk(2); return (x * y.flip(0)).sum(-1).exp().mean()", {"a": normal(8, 4)},
        ("tp=2", "drawn:tp=2", "drawn:dp=2"),
    ),
    # `momentum=None` makes a number of a buffer, and was refused as control flow
    "cumulative batch norm": Finding(
        "self.m = nn.BatchNorm1d(4, momentum=None)", "return (self.m(a) * a.sin()).square().sum()", {"a": normal(4, 4)},
    ),
    # batch norm without running statistics was computed on every rank
    "batch norm without running statistics": Finding(
        "self.m = nn.BatchNorm2d(4, track_running_stats=False)", "return (self.m(a) * a.sin()).square().sum()",
        {"a": normal(4, 4, 3, 3)},
    ),
    # two axes of 2 took both groups of channels apart: each divides their number, together they do not
    "groups of channels on two axes": Finding(
        "self.m = nn.GroupNorm(2, 4); self.n = nn.Conv1d(4, 8, 1, groups=2)", "return self.n(self.m(a)).sin().square().sum()",
        {"a": normal(4, 4, 4)}, ("drawn:tp=2,tp2=2", "tp=2,tp2=2"), world=4, seeds=range(6),
    ),
}  # fmt: skip


def trials(name: str, folder: str) -> list[Trial]:
    """Each plan of a finding; drawn ones with some seeds."""
    finding = FINDINGS[name]
    out, graphs = [], dict[str, Graph]()
    for plan in finding.plans:
        for seed in finding.seeds if plan.startswith("drawn:") else (0,):
            out.append(prepare(seed, folder, finding.world, plan, finding.written(), graphs))
    return out


def test_all_equal_one_process(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: trials(name, folder) for name in FINDINGS}
        every = [trial for each in found.values() for trial in each]
        run_trials(every, ranks)
    for name, each in found.items():
        for trial in each:
            assert not trial.wrong, f"{name}: {trial.headline} ({trial.stage}): {trial.wrong}"
            wanted = FINDINGS[name].refused
            assert (wanted in trial.refused) if wanted else not trial.refused, (name, trial.refused)
            assert not trial.refused or is_said_well(trial.refused), (name, trial.refused)
        assert each


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_makes_one_model(seed: int) -> None:
    from support.fuzzing.models.writer import model_of, write_model

    first, second = write_model(seed), write_model(seed)
    assert first.text == second.text and first.inputs.keys() == second.inputs.keys()
    assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
    states = [model_of(each, seed).state_dict() for each in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_one_wrong_number_is_found_and_named(ranks: RankPool) -> None:
    """A trial whose program computes something else is told, with the command that makes it again."""
    with tempfile.TemporaryDirectory() as folder:
        trial = prepare(3, folder, 2, "dp=2", FINDINGS["adaptive pooling of two dimensions"].written())
        assert trial.case is not None
        trial.case = trial.case._replace(state={**trial.case.state, "m.bias": trial.case.state["m.bias"] + 1e-6})
        run_trials([trial], ranks)
    assert "loss 0" in trial.wrong and "gradient m.weight" in trial.wrong
    tally = Tally()
    tally.wrong.append(trial)
    assert "python -m support.fuzzing.models --seed 3" in tally.failures
