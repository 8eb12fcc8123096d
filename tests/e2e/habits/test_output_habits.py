"""Habits of what a model returns, and of models that nothing trains (docs/habits.md), on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from support.harness.comparison import same_gradients
from support.harness.habits import cluster, refusal, test_habit, test_habit_under_other_plans, under  # noqa: F401
from support.models.zoo.output_model import classifier, convolutions, examples, pictures
from torch import Tensor, nn

import autopar

ROUNDING = 2e-2


def parallel_of(model: nn.Module, force: str, example: Any = None, **options: Any) -> Any:
    options = {"cache": False, "time_limit_seconds": 5, **options}
    return autopar.parallelize(model, cluster(), example or examples(), force=force, **options)


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=1e-11)


def frozen_teacher(force: str) -> None:
    """A distillation: the teacher's logits are a target of the student, whose loss has two terms."""
    plain = [classifier("logits", seed) for seed in (1, 2)]
    plain[0].requires_grad_(False)
    x = {"x": examples()["x"]}
    teacher = parallel_of(plain[0], force, x)
    student = parallel_of(plain[1], force if "pp=" not in force else "dp=4", x)
    assert not [p for p in teacher.parameters() if p.requires_grad]
    for seed in range(2):
        x = {"x": examples(seed)["x"]}
        targets, expected = teacher(**x), plain[0](**x)
        assert not targets.requires_grad
        same(targets, expected)
        for model, target in ((student, targets), (plain[1], expected)):
            nn.functional.kl_div(model(**x).log_softmax(-1), target.log_softmax(-1), log_target=True).backward()
    same_gradients(student, plain[1])


def frozen_reference(force: str) -> None:
    """As in DPO: the reference's loss is a number beside the policy's, with and without gradients on; then it trains."""
    plain = [classifier("fields", seed) for seed in (1, 1)]
    plain[0].requires_grad_(False)
    reference, policy = parallel_of(plain[0], force), parallel_of(plain[1], force)
    for seed in range(2):
        losses = []
        for fixed, trained in ((reference, policy), (plain[0], plain[1])):
            bound = fixed(**examples(seed)).loss
            assert not bound.requires_grad
            with torch.no_grad():
                same(fixed(**examples(seed)).loss, bound)
            loss = -nn.functional.logsigmoid(bound - trained(**examples(seed)).loss)
            loss.backward()
            losses.append(loss)
        same(*losses)
    same_gradients(policy, plain[1])
    for model in (reference, plain[0]):
        model.requires_grad_(True)
        model(**examples()).loss.backward()
    same_gradients(reference, plain[0])


class Tagger(nn.Module):
    """Returns a loss and logits where there are labels, else the logits alone, in a dictionary or as a tuple."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.named, self.first, self.last = named, nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.last(self.first(x).relu())
        if labels is None:
            return {"logits": logits} if self.named else logits
        loss = nn.functional.cross_entropy(logits, labels)
        hits = (logits.argmax(-1) == labels).double()
        return {"loss": loss, "logits": logits, "hits": hits} if self.named else (loss, logits)


def outputs_where_returned(force: str) -> None:
    """A loop with metrics, then predictions without labels, with gradients on and off, whose fields are not those asked for."""
    x, labels = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    for named, outputs in ((True, ("hits", "loss:loss")), (False, ("1",)), (False, ("0:loss", "1"))):
        plain, parallel = Tagger(named), parallel_of(Tagger(named), force, {"x": x, "labels": labels}, outputs=outputs)
        for model in (plain, parallel):
            found = model(x, labels=labels)
            (found["loss"] if named else found[0]).backward()
        same(found["hits"] if named else found[1], plain(x, labels=labels)["hits" if named else 1])
        same_gradients(parallel, plain)
        staged = parallel.program.mesh.pp.size > 1  # outputs that take gradients are refused there
        for mode in (torch.no_grad, *([] if staged else [torch.enable_grad])):
            with mode():
                alone, expected = parallel(x), plain(x)
                same(alone["logits"] if named else alone, expected["logits"] if named else expected)
    said = refusal(lambda: parallel_of(Tagger(True), force, {"x": x}, outputs=("hits",)))
    assert "pass example inputs with which the model returns it (labels)" in said


def logits_in_evaluation(force: str) -> None:
    """An evaluation loop with metrics, of models that return a class or a tuple: under ``no_grad`` all that one process returns
    is there, as full tensors; with uneven last batches; training does not gather it."""
    for returns, at in (("fields", "logits"), ("loss first", 1), ("loss last", 0)):
        plain, parallel = classifier(returns), parallel_of(classifier(returns), force)
        for model in (plain, parallel):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = model(**examples())
            (found.loss if at == "logits" else found[1 - at]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for training in (True, False):
            for size in (8, 7):
                said: list[tuple[Tensor, Tensor]] = []
                for model in (parallel, plain):
                    model.train(training)
                    with torch.no_grad():
                        found = model(**examples(3, size))
                    logits, loss = (found.logits, found.loss) if at == "logits" else (found[at], found[1 - at])
                    assert type(logits) is Tensor
                    said.append((logits, loss))
                same(said[0][0], said[1][0])
                same(said[0][1], said[1][1])
                accuracy = [(logits.argmax(-1) == examples(3, size)["labels"]).double().mean().item() for logits, _ in said]
                assert accuracy[0] == accuracy[1]
        kinds = len(parallel.variants.programs)
        with torch.no_grad():
            parallel(**examples())
        assert len(parallel.variants.programs) == kinds


def field_in_training(force: str) -> str:
    """The same fields with gradients on, and without asking."""
    parallel = parallel_of(classifier(), force)
    found = parallel(**examples())
    found.loss.backward()
    assert not hasattr(found.logits, "shape") and "logits: not returned" in repr(found.logits)
    uses: list[Any] = [lambda: found.logits.argmax(-1), lambda: torch.argmax(found.logits), lambda: found.logits[0],
                       lambda: found.logits == 1, lambda: len(found.logits), lambda: found.loss + found.logits]  # fmt: skip
    said = {refusal(use) for use in uses}
    with parallel.returning("logits"):
        same(parallel(**examples()).logits, classifier()(**examples()).logits)
    assert len(said) == 1
    return said.pop()


class Contrastive(nn.Module):
    """As CLIP: two embeddings, and a scale that is a scalar but no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = classifier("logits", 1), classifier("logits", 2)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(image), self.text(text), self.scale.exp()


def scalar_beside_outputs(force: str) -> None:
    """The loss is computed outside, of all that the model returns, and of what changes some of it in place."""
    pair = {"image": examples(1)["x"], "text": examples(2)["x"]}
    if "pp=" in force:
        assert "from a loss outside of the program" in refusal(lambda: parallel_of(Contrastive(), force, pair))
        return
    plain = Contrastive()
    parallel = parallel_of(Contrastive(), force, pair)
    losses = []
    for model in (parallel, plain):
        image, text, scale = model(**pair)
        image[:, 0] = 0
        text += 1
        losses.append(nn.functional.cross_entropy(scale * image @ text.T, torch.arange(len(image))))
        losses[-1].backward()
    same(*losses)
    same_gradients(parallel, plain)


class TwoHeads(nn.Module):
    """A trunk with a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.first, self.second = (nn.Linear(8, size, dtype=torch.float64) for size in (8, 4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.first(h), self.second(h).softmax(-1)


@under("tp=2,dp=1")
def one_task_a_step(force: str) -> None:
    """Weight decay and moments move parameters with a gradient of zeros, but not those without one."""
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if "pp=" in force:
        assert "from a loss outside of the program" in refusal(lambda: parallel_of(TwoHeads(), force, (x,)))
        return
    plain, *others = TwoHeads(), *(parallel_of(TwoHeads(), force, (x,), compile=how) for how in (False, "aot_eager"))
    for model in (plain, *others):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for task in (0, 0, 1, 0):
            model(x)[task].square().mean().backward()
            without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
            assert {name.partition(".")[0] for name in without} == {("second", "first")[task]}
            optimizer.step()
            optimizer.zero_grad()
    for state in [each.full_state() for each in others]:
        for name, expected in plain.state_dict().items():
            same(state[name], expected)


class Branch(nn.Module):
    """A layer with a term of an auxiliary loss, which has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.balance = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.up(x)), term + self.balance(x).square().mean()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Branch() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        term = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, term = layer(x, term)
        return x.square().mean(), term


@under("dp=2,zero=3")
def auxiliary_loss_of_some_steps(force: str) -> None:
    """The parameters that only the auxiliary loss reads have no gradients in the other steps."""
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if "pp=" in force:
        assert "from a loss outside of the program" in refusal(lambda: parallel_of(Branches(), force, (x,)))
        return
    plain, *others = Branches(), *(parallel_of(Branches(), force, (x,), compile=how) for how in (False, "aot_eager"))
    for model in (plain, *others):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(3):
            loss, term = model(x)
            (loss + term if step == 1 else loss).backward()
            without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
            assert len(without) == (0 if step == 1 else 6) and all("balance" in name for name in without)
            optimizer.step()
            optimizer.zero_grad()
    for state in [each.full_state() for each in others]:
        for name, expected in plain.state_dict().items():
            same(state[name], expected)


def autocast_with_batch_norm(force: str) -> None:
    """Captured in float32 or under autocast; trained, then evaluated, in both; with running statistics in float32."""
    if "pp=" in force:
        assert "takes several micro-batches" in refusal(lambda: parallel_of(convolutions(), force, pictures()))
        return
    for around in (None, torch.bfloat16):
        plain = convolutions()
        with torch.autocast("cpu", dtype=around, enabled=around is not None):
            parallel = parallel_of(convolutions(), force, pictures())
        for dtype in (torch.bfloat16, torch.float16, None):
            losses: list[list[float]] = [[], []]
            for said, model in zip(losses, (parallel, plain), strict=True):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for training in (True, True, False):
                    model.train(training)
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                        loss = model(**pictures())
                    loss.backward()
                    optimizer.step()
                    said.append(float(loss.detach()))
            torch.testing.assert_close(*map(torch.tensor, losses), rtol=ROUNDING, atol=0)
        statistics = parallel.full_state()["norm.running_var"]
        torch.testing.assert_close(statistics, plain.norm.running_var, rtol=ROUNDING, atol=1e-3)
