"""`parallelize` and `plan` as Python calls: what needs no processes, and what one process can show."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main


class Net(nn.Module):
    """Two linears and a loss."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), target)


def batch(size: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 16), "target": torch.randint(0, 16, (size,))}


def test_plan_and_its_words() -> None:
    plan = autopar.plan(Net(), "local:4", batch(), force="tp=4")
    assert plan.candidate.mesh.size_of("tp") == 4 and "tp=4" in plan.describe()
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_a_tuple_of_inputs() -> None:
    assert autopar.plan(Net(), "local:2", tuple(batch().values())).candidate.devices == 2


def test_a_meta_model_can_be_planned() -> None:
    with torch.device("meta"):
        model = Net()
    assert autopar.plan(model, "local:2", batch()).document.model.params == sum(p.numel() for p in model.parameters())


def test_other_example_inputs_are_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="dict"):
        autopar.plan(Net(), "local:2", torch.randn(8, 16))  # type: ignore[arg-type]


def test_without_example_inputs_there_are_no_parameters_yet() -> None:
    parallel = autopar.parallelize(Net(), "local:1")
    for too_early in (
        *(parallel.parameters, parallel.state_dict, parallel.named_parameters, lambda: list(parallel.named_buffers())),
        *(
            parallel.zero_grad,
            parallel.double,
            parallel.local_batch,
            parallel.full_state,
            parallel.full_gradients,
            parallel.flush,
        ),
        *(parallel.trace, parallel.generate, parallel.measure, parallel.report, lambda: parallel.clip_grad_norm_(1.0)),
        *(lambda: parallel.sampler([0]), lambda: parallel.reseed(0), lambda: parallel.save("x", step=0)),
        *(lambda: parallel.load("x"), lambda: parallel.save_pretrained("x"), lambda: parallel.load_pretrained("x")),
        *(lambda: parallel.load_state_dict({}), lambda: parallel.load_full_state({}), lambda: copy.deepcopy(parallel)),
        *(parallel.expert_load, lambda: parallel.returning("logits").__enter__(), lambda: list(parallel.buffers())),
    ):
        with pytest.raises(autopar.StateError, match="example_inputs"):
            too_early()
    assert not hasattr(parallel, "config") and not parallel.eval().training and repr(parallel)


def test_the_wrong_number_of_processes() -> None:
    with pytest.raises(autopar.PlanMismatch, match="torchrun --nproc-per-node 4"):
        autopar.parallelize(Net(), "local:4", batch())


def test_a_plan_for_another_model() -> None:
    from autopar.api import check_plan

    plan = autopar.plan(Net(), "local:2", batch())
    cluster = autopar.Cluster.parse("local:2")
    assert check_plan(plan, Net(), cluster, batch()) == plan
    with pytest.raises(autopar.PlanMismatch, match="another|made for"):
        check_plan(plan, Net(64), cluster, batch())
    with pytest.raises(autopar.PlanMismatch, match="devices"):
        check_plan(plan, Net(), autopar.Cluster.parse("local:4"), batch())


def test_a_plan_for_another_dtype() -> None:
    from autopar.api import check_options

    plan = autopar.plan(Net(), "local:2", batch())
    check_options(plan, Net(), None, None)
    with pytest.raises(autopar.PlanMismatch, match=r'in bfloat16: .* say precision=autopar.Precision\("float32", "float32"\)'):
        check_options(plan, Net().to(torch.bfloat16), None, None)
    for asked in ("float32", autopar.Precision("float32", "float32")):
        check_options(plan, Net().to(torch.bfloat16), asked, None)
    mixed = autopar.plan(Net().to(torch.bfloat16), "local:2", batch(), precision="bf16")
    check_options(mixed, Net().to(torch.bfloat16), None, None)  # its float32 weights were asked for


def test_a_missing_plan_file() -> None:
    from autopar.api import check_plan

    with pytest.raises(autopar.PlanError, match="No such file"):
        check_plan(Path("none.json"), Net(), autopar.Cluster.parse("local:2"), batch())


class Unruled(Net):
    """With an operation that the table does not have."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.linalg.inv(x), target)


def test_an_operation_without_a_rule_is_replicated_and_said() -> None:
    inputs = {"x": torch.randn(16, 16), "target": torch.randint(0, 16, (16,))}
    with pytest.warns(UserWarning, match="no sharding rule"):
        plan = autopar.plan(Unruled(), "local:2", inputs, force="tp=2")
    assert any("inv" in op or "linalg" in op for op in plan.document.replicated_ops)
    with pytest.raises(autopar.UnsupportedOp, match="register_rule"):
        autopar.plan(Unruled(), "local:2", inputs, strict=True)


def test_a_rule_that_does_not_parse() -> None:
    with pytest.raises(ValueError):
        autopar.register_rule("mylib::op", "a b -> -> c")


def test_one_process_trains(tmp_path: Path) -> None:
    """The first call builds the model; then it is what its example would have made it."""
    torch.manual_seed(0)
    model, inputs = Net(), batch()
    parallel = autopar.parallelize(model, "local:1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss = parallel(**inputs)
    assert torch.allclose(loss, model(**inputs))
    loss.backward()
    names = [name for name, _ in parallel.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    optimizer.step()
    assert parallel(**inputs) < loss
    torch.distributed.destroy_process_group()


@dataclass
class Result:
    """What a model may return."""

    loss: torch.Tensor
    logits: torch.Tensor | None = None


class WithLogits(Net):
    def forward(self, x: torch.Tensor, target: torch.Tensor, *, gain: float = 1.0) -> Result:  # type: ignore[override]
        logits = self.down(torch.relu(self.up(x))) * gain
        return Result(nn.functional.cross_entropy(logits, target), logits)


@pytest.mark.parametrize("asked", [(), ("logits",)])
def test_the_class_of_the_model_comes_back(asked: tuple[str, ...]) -> None:
    """With what was asked for in it; what was not says so when it is used. The first call is the example."""
    torch.manual_seed(0)
    model, inputs = WithLogits(), batch()
    expected = model(**inputs, gain=2.0)
    parallel = autopar.parallelize(model, "local:1", outputs=asked, cache=False)
    for _ in range(2):
        out = parallel(inputs["x"], target=inputs["target"], gain=2.0)
        assert type(out) is Result and torch.allclose(out.loss, expected.loss)
        out.loss.backward()
    if asked:
        assert torch.allclose(out.logits, expected.logits)
    else:
        with pytest.raises(autopar.AutoparError, match=r'does not return logits .* pass outputs=."logits",.'):
            out.logits.argmax(-1)
        with torch.no_grad():
            assert torch.allclose(parallel(**inputs, gain=2.0).logits, expected.logits)
    assert torch.allclose(parallel(**inputs, gain=3.0).loss, model(**inputs, gain=3.0).loss), "another program"
    torch.distributed.destroy_process_group()


def test_a_plan_says_what_it_returns() -> None:
    from autopar.api import check_plan

    inputs, cluster = batch(), autopar.Cluster.parse("local:2")
    plan = autopar.plan(WithLogits(), "local:2", inputs, force="dp=2")
    assert plan.graph.interface is not None and plan.graph.interface.left_out == ("logits",)
    with pytest.raises(autopar.PlanMismatch, match="returns no logits"):
        check_plan(plan, WithLogits(), cluster, inputs, ("logits",))
    asked = autopar.plan(WithLogits(), "local:2", inputs, force="dp=2", outputs=("logits",))
    more = [each.document.predicted.peak_memory_bytes for each in (plan, asked)]
    assert more[1] - more[0] == 8 // 2 * 16 * 4  # type: ignore[operator]  # a data rank's part of the logits, which the user holds
    assert [output.path for output in asked.graph.outputs] == ["logits"] and asked.graph.interface.left_out == ()  # type: ignore[union-attr]
    assert autopar.Plan.from_json(asked.to_json()) == asked == check_plan(asked, WithLogits(), cluster, inputs)


FACTORY = """
import torch
from torch import nn


class Pair(nn.Linear):
    def forward(self, x, y=None):
        logits = super().forward(x)
        return logits, None if y is None else nn.functional.cross_entropy(logits, y)


def with_loss():
    return Pair(4, 3), (torch.randn(6, 4), torch.arange(6) % 3)


def without():
    return Pair(4, 3), (torch.randn(6, 4),)
"""


@pytest.mark.parametrize("made", ["with_loss", "without"])
@pytest.mark.usefixtures("forked_ranks")
def test_verify_of_results_that_are_no_loss(made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``(logits, loss)``, and logits alone, whose sum stands in for a loss."""
    (tmp_path / "models.py").write_text(FACTORY)
    assert main(["verify", f"{tmp_path}/models.py:{made}", "--cluster", "local:2", "--force", "dp=2"]) == 0
    assert "equal" in capsys.readouterr().out


def test_a_program_without_a_loss_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    assert main(["plan", f"{tmp_path}/models.py:without", "--cluster", "local:2", "-o", f"{tmp_path}/plan.json"]) == 0
    assert "the model's result" not in capsys.readouterr().err
    assert main(["export", f"{tmp_path}/plan.json", f"{tmp_path}/out"]) == 2
    assert "Pair returns no loss" in capsys.readouterr().err
