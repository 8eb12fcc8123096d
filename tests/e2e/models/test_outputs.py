"""What `parallel(...)` gives back, on real ranks: the model's own class, fields as DTensors, gradients of the loss only."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import ROOT, RankPool
from support.harness.training_loop import parallel_model
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, PlanMismatch
from autopar.runtime.step.results import LeftOut

Pair = namedtuple("Pair", "loss logits")


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    states: tuple[Tensor, ...]
    words: dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Three layers, a head, and a result of many kinds of fields."""

    def __init__(self, kind: str = "class") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head, self.kind = nn.Linear(16, 8), kind

    def forward(self, x: Tensor, target: Tensor) -> Any:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits, target)
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        if self.kind == "tuple":
            return loss, logits
        if self.kind == "namedtuple":
            return Pair(loss, logits)
        if self.kind == "object":
            return SimpleNamespace(loss=loss, logits=logits)
        return Result(loss, logits, tuple(states), {"norm": x.square().sum(), "right": logits.argmax(-1) == target, "depth": 3})


ASKED = ("logits", "states.1", "words.norm", "words.right")


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    return {"x": x, "target": torch.randint(0, 8, (16,), generator=generator)}


@cache
def net() -> tuple[Net, Case]:
    torch.manual_seed(0)
    model = Net().double()
    return model, case_of(model, (), batch(), tuple(f"{path}:dtensor" for path in ASKED))


def fields(text: str, state: dict[str, Tensor], form: Any, given: dict[str, Tensor], paths: tuple[str, ...]) -> Any:
    """On a rank: for training and for evaluation the loss, the outputs (whole, and where they are), the rest."""
    out = []
    parallel = parallel_model(text, state, form=form)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            result = parallel.train(training)(**given)
        if training:
            result.loss.backward()
        found = {}
        for path in paths:
            value = _at(result, path)
            found[path] = None if value is None else (value.full_tensor().detach(), [str(place) for place in value.placements])
        out.append((result.loss.item(), found, _at(result, "states.0"), result.words["depth"]))
    from autopar.runtime.errors import RuntimeProblem

    problem, mine = "", parallel.full_gradients()
    result = parallel.train()(**given)
    try:
        (result.loss + (0 if result.logits is None else result.logits.full_tensor().mean())).backward()
    except RuntimeProblem as error:
        problem = str(error)
    return out, mine, problem


def _at(result: Any, path: str) -> Any:
    for part in path.split("."):
        result = result[int(part)] if part.isdigit() else result[part] if isinstance(result, dict) else getattr(result, part)
    return result


FORCED = [
    {"dp": 2, "tp": 2, "zero": 3, "micro": 2},
    {"pp": 2, "tp": 2, "micro": 2},
    pytest.param({"dp": 2, "tp": 2, "zero": 0}, marks=pytest.mark.slow),
    pytest.param({"tp": 4, "micro": 4}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "zero": 0, "micro": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("force", FORCED, ids=str)
def test_fields_are_those_of_one_process(force: dict[str, int], ranks: RankPool) -> None:
    model, case = net()
    model.zero_grad()
    expected = model(**batch())
    expected.loss.backward()
    given = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = ranks.run(fields, case.text(**{"pp": 1, **force}), case.state, case.form, batch(), ASKED)
    last = 4 // force.get("pp", 1) * (force.get("pp", 1) - 1)
    for rank, (modes, mine, problem) in enumerate(found):
        for loss, outputs, left_out, depth in modes:
            assert loss == pytest.approx(expected.loss.item(), rel=1e-12) and isinstance(left_out, LeftOut) and depth == 3
            for path in ASKED:
                if rank < last:
                    assert outputs[path] is None, "an earlier stage"
                    continue
                value, places = outputs[path]
                torch.testing.assert_close(value, _at(expected, path).detach(), rtol=1e-10, atol=1e-12, check_dtype=True)
                assert "Partial" not in str(places)
                if path != "words.norm" and force.get("dp", 1) > 1:
                    assert places[0] == "S(0)"
        for name, gradient in given.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-12)
        assert rank < last or "only the loss takes gradients" in problem and "logits" in problem


def kinds(cases: list[tuple[str, dict[str, Tensor], Any]], given: dict[str, Tensor], class_is_gone: bool) -> list[Any]:
    """On a rank: what comes back for each form."""
    out = []
    for text, state, form in cases:
        with patch.dict(sys.modules):
            if class_is_gone:
                del sys.modules[__name__]
            result = parallel_model(text, state, form=form)(**given)
        loss = result if isinstance(result, Tensor) else result[0] if isinstance(result, tuple) else None
        loss = loss if loss is not None else result["loss"] if isinstance(result, dict) else result.loss
        loss.backward()
        out.append((type(result).__name__, loss.item(), len(result) if isinstance(result, (tuple, dict)) else 0))
    return out


def test_kinds_of_results(ranks: RankPool) -> None:
    """Nothing is asked for: containers come back with what is left out in the places of tensors; of a class that a rank does not
    have, a plain namespace."""
    cases, expected = [], None
    for kind in ("dict", "tuple", "namedtuple", "object"):
        torch.manual_seed(0)
        model = Net(kind).double()
        case = case_of(model, (), batch())
        assert case.graph.interface is not None and case.graph.interface.left_out == (("1",) if kind == "tuple" else ("logits",))
        cases.append((case.text(dp=4, zero=0, pp=1), case.state, case.form))
        expected = expected or model(**batch())["loss"].item()
    for gone, pair in ((False, ("Pair", 2)), (True, ("SimpleNamespace", 0))):
        for found in ranks.run(kinds, cases, batch(), gone):
            names = [("dict", 2), ("tuple", 2), pair, ("SimpleNamespace", 0)]
            assert [(name, size) for name, _, size in found] == names
            assert [loss for _, loss, _ in found] == [pytest.approx(expected, rel=1e-12)] * 4


def test_unknown_outputs_are_refused() -> None:
    with pytest.raises(CaptureError, match="no tensor 'logitz'; there is logits, states, words"):
        capture(Net(), (), {name: x.float() if name == "x" else x for name, x in batch().items()}, outputs=("logitz",))


def test_an_input_may_be_an_output() -> None:
    class Echo(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).sum(), x

    assert [each.path for each in capture(Echo(4, 4), (torch.randn(8, 4),), outputs=("1",)).outputs] == ["1"]


SCRIPT = """
import sys
sys.path.insert(0, "tests")
import torch, torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions as Output
from support.models.small_models import make
import autopar
from autopar.runtime.step.results import LeftOut
model, batch = make("gpt2", torch.float32, 8)
expected = model(**batch)
parallel = autopar.parallelize(model, "local:2", batch, force="dp=2", outputs=("logits",), cache=False)
for _ in range(2):
    out = parallel(**batch)
    assert type(out) is Output and out.hidden_states is None and list(out.keys()) == ["loss", "logits"], out
    torch.testing.assert_close(out.logits, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss)
    assert type(out.logits) is torch.Tensor and out["loss"] is out.loss is out[0]
out.loss.backward()
assert all(p.grad is not None for p in parallel.parameters())
print("right" * (dist.get_rank() == 0))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_class_of_transformers(tmp_path: Any) -> None:
    """The user's loop, unchanged, under torchrun."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "train.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "right" in done.stdout, done.stderr[-3000:]


class Critic(nn.Module):
    """Its loss does not read one of its heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.policy, self.value = (nn.Linear(6, size, dtype=torch.float64) for size in (6, 6, 1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x)
        logits = self.policy(h)
        return {"loss": logits.square().mean(), "logits": logits, "value": self.value(h), "both": [h, logits + self.value(h)]}


def heads(force: str) -> None:
    """On a rank: without gradients."""
    plain, x = Critic(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for outputs in ((), ("value",)):
        parallel: Any = autopar.parallelize(Critic(), "local:2", {"x": x}, force=force, outputs=outputs, cache=False)
        for _ in range(2):
            with torch.no_grad():
                found, expected = parallel(x=x), plain(x)
            torch.testing.assert_close([found["loss"], found["logits"]], [expected["loss"], expected["logits"]])
            torch.testing.assert_close(found["both"][0], expected["both"][0])
            if outputs:
                torch.testing.assert_close(found["value"], expected["value"])
                continue
            with pytest.raises(autopar.AutoparError, match=r'value.weight, which the first program .*outputs=\("value",\)'):
                found["value"].sum()
            parallel(x=x)["loss"].backward()


@pytest.mark.parametrize("force", ["dp=2", "pp=2,micro=2"])
def test_a_head_that_the_loss_does_not_read(force: str, ranks: RankPool) -> None:
    """All fields were left out, with the words to call it under ``torch.no_grad()``."""
    ranks.run(heads, force, world=2)


def no_other_program() -> None:
    """On a rank: the program of training is the only one."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parallel: Any = autopar.parallelize(Critic(), "local:2", {"x": x}, force="dp=2", cache=False)
    for _ in range(2):
        with patch("autopar.variants.maker.plan_variant", side_effect=PlanMismatch("it is too large")), torch.no_grad():
            found = parallel(x=x)
        with pytest.raises(autopar.AutoparError, match=r"logits, also without gradients: no program .* \(it is too large\)"):
            found["logits"].sum()


def test_the_reason_is_said_where_no_program_returns_all_fields(ranks: RankPool) -> None:
    ranks.run(no_other_program, world=2)


class Policy(nn.Module):
    """Returns a distribution and its input, by task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, batch: Any) -> dict[int, Any]:
        h = self.layer(batch.x)
        return {1: torch.distributions.Normal(h, h.exp()), 0: (batch.x, h.topk(2))}


def objects() -> list[Any]:
    found, plain = list[Any](), Policy()
    example = {"batch": SimpleNamespace(x=torch.ones(4, 6, dtype=torch.float64))}
    parallel: Any = autopar.parallelize(Policy(), "local:2", example, force="dp=2")
    for size in (4, 6):
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        for model in (plain, parallel):
            result = model(SimpleNamespace(x=x))
            score = result[1].log_prob(torch.ones(4, dtype=torch.float64)).sum() + result[0][1].values.sum()
            score.backward()
            found.append((list(result), score.item(), result[1].batch_shape, torch.equal(result[0][0], x), result[0][1].indices))
    same_gradients(parallel, plain)
    return found


def test_objects_are_those_of_one_process(ranks: RankPool) -> None:
    """Keys that are no texts, private attributes, classes of torch and an input of the model, at two sizes of the batch."""
    for found in ranks.run(objects, world=2):
        for expected, each in zip(found[::2], found[1::2], strict=True):
            assert each[0] == expected[0] and each[1] == pytest.approx(expected[1], rel=1e-12) and each[2:4] == expected[2:4]
            assert torch.equal(each[4], expected[4])


class Counts(nn.Module):
    """Numbers of the batch's size beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Any]:
        sizes = {"rows": x.shape[0], "numbers": x.numel(), "more": 2 * x.size(0) - 3}
        return {"loss": self.layer(x).square().mean(), **sizes}


def counts() -> None:
    torch.manual_seed(0)
    plain, x = Counts(), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(plain, "local:2", (x,), force="dp=2,micro=2", cache=False)
    for size in (8, 4, 5, 1):
        assert {**parallel(x[:size]), "loss": 0} == {**plain(x[:size]), "loss": 0}
    part = parallel(parallel.local_batch(x[:4]))
    assert part["rows"] == 8 and type(part["rows"]) is int


def test_the_size_of_the_batch_beside_the_loss(ranks: RankPool) -> None:
    ranks.run(counts, world=2)
