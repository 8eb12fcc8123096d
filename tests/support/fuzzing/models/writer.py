"""Writes the text of a random model, and makes models of texts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from support.fuzzing.models.body import SIZES, Body, fits, names
from support.fuzzing.models.statements import LOSS_STATEMENTS

BATCHES = (1, 2, 3, 4, 4, 4, 4, 6, 8, 8, 8)
HEAD = """import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""
INSIDE = "        "


class Unfit(Exception):
    """No model can be made of these draws."""


@dataclass(slots=True)
class Written:
    """A model as text: the class ``Model``, with what makes its inputs."""

    text: str
    inputs: dict[str, Tensor]
    training: bool
    low: bool
    """Whether it computes something in float32."""
    random: bool


def write_model(seed: int) -> Written:
    """The model of a seed."""
    draw = Random(f"model {seed}")
    for _ in range(50):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.randrange(2**31))
            try:
                return _written(draw)
            except Unfit:
                continue
    raise Unfit(f"seed {seed}")


def _written(draw: Random) -> Written:
    inputs = drawn_inputs(draw)
    training = draw.random() < 0.93
    live = nn.Module().train(training)
    body = Body(draw, live, {name: each.clone() for name, each in inputs.items()}, frozenset(inputs), {})
    classes: list[str] = []
    count = draw.choice((3, 4, 5, 6, 7, 8, 10, 12))
    layers = draw.random() < 0.35
    if not any(each.is_floating_point() for each in body.values.values()):
        add_embedding(body)
    for number in range(count):
        if layers and number == count // 2:
            add_layers(body, classes)
        else:
            body.statement()
    loss = [part for name in list(body.unused) if (part := loss_of(body, name))]
    if not loss:
        raise Unfit
    returned, value = drawn_result(body, " + ".join(loss), draw)
    if not list(live.parameters()) or not value.requires_grad or not any(p.requires_grad for p in live.parameters()):
        raise Unfit
    try:
        value.backward()
    except RuntimeError:
        raise Unfit from None
    grads = [p.grad for p in live.parameters() if p.grad is not None]
    if not grads or not all(bool(g.isfinite().all()) and float(g.abs().max()) < 1e4 for g in grads):
        raise Unfit
    model = class_text("Model", body, list(inputs), [*returned])
    text = HEAD + "".join(f"\n\n{each}" for each in (*classes, model))
    return Written(text, inputs, training, "low" in body.kinds, "random" in body.kinds or "Dropout" in text)


def add_embedding(body: Body) -> None:
    """The first floating-point value of a model of integers."""
    ids = body.draw.choice([name for name, each in body.values.items() if each.dtype is torch.int64])
    module, value, size = body.fresh("m"), body.fresh(), body.draw.choice(SIZES)
    embedding = nn.Embedding(7, size).double()
    setattr(body.live, module, embedding)
    body.made.append(f"self.{module} = nn.Embedding(7, {size})")
    body.lines.append(f"{value} = self.{module}({ids})")
    body.keep(value, embedding(body.values[ids]), [])


def drawn_inputs(draw: Random) -> dict[str, Tensor]:
    """One or two floating-point tensors, some integers and a mask, all with the batch in front."""
    batch = draw.choice(BATCHES)
    length, width = draw.choice(SIZES), draw.choice(SIZES)
    shapes = [(width,), (length, width), (length, width), (draw.choice((1, 2, 3)), 4, 4), (draw.choice((2, 3)), 6, 5)]
    out: dict[str, Tensor] = {}
    if draw.random() < 0.85:
        out["a"] = torch.randn(batch, *draw.choice(shapes), dtype=torch.float64)
    if draw.random() < 0.35:
        out["b"] = torch.randn(batch, *draw.choice(shapes), dtype=torch.float64)
    if not out or draw.random() < 0.6:
        out["ids"] = torch.randint(7, (batch, *draw.choice(((), (length,), (length,)))))
    if draw.random() < 0.2:
        out["mask"] = torch.rand(batch, *draw.choice(((), (length,)))) < 0.7
    if not any(each.is_floating_point() for each in out.values()) and out["ids"].dim() == 1 and draw.random() < 0.5:
        out["ids"] = torch.randint(7, (batch, length))
    return out


def loss_of(body: Body, name: str) -> str | None:
    """An expression that makes a number of a value, which nothing else reads."""
    for _ in range(6):
        template = body.draw.choice(LOSS_STATEMENTS)
        slots = body.slots(template)
        if slots is None:
            continue
        x = body.values[name]
        slots |= {"x": name, "last": x.shape[-1] if x.dim() else 1, "chan": x.shape[1] if x.dim() > 1 else 1}
        expression = template.format(**slots)
        try:
            value = eval(expression, {**names(), **body.values, "self": body.live})
        except Exception:
            continue
        if fits(value) and value.dim() == 0:
            return expression
    return f"{name}.mean()"


def drawn_result(body: Body, loss: str, draw: Random) -> tuple[list[str], Tensor]:
    """The lines that return, and a number to take gradients of."""
    space = {**names(), **body.values, "self": body.live}
    value = eval(loss, space)
    if not fits(value):
        raise Unfit
    grown = [name for name in body.values if name not in body.given and body.values[name].is_floating_point()]
    form, other = draw.random(), draw.choice(grown) if grown else ""
    if form < 0.6 or not other:
        return [f"return {loss}"], value
    if form < 0.75:
        return [f'return {{"loss": {loss}, "hidden": {other}}}'], value
    if form < 0.85 and body.values[other].numel() > 1:
        return [f"loss = {loss}", f"return {other}, loss"], value
    flowing = [name for name in body.unused if body.values[name].requires_grad]
    if not flowing:
        return [f"return {loss}"], value
    several = ", ".join(flowing)
    return [draw.choice((f"return [{several}]", f"return ({several},)", f"return {flowing[-1]}"))], value


def add_layers(body: Body, classes: list[str]) -> None:
    """A class of its own that keeps a value's shape, called several times: as layers, as one shared module, on two values, or
    with two results."""
    draw = body.draw
    candidates = [name for name in body.unused if body.values[name].dim() > 1] or [
        name for name, each in body.values.items() if each.is_floating_point()
    ]
    if not candidates:
        return
    name = draw.choice(candidates)
    x = body.values[name].detach()
    inner = Body(draw, nn.Module().train(body.live.training), {"h": x}, frozenset("h"), {})
    inner.count = 100
    for _ in range(draw.choice((1, 2, 3, 4))):
        inner.statement()
    same = [each for each in inner.unused if inner.values[each].shape == x.shape]
    rest = [each for each in inner.unused if each not in same and inner.values[each].numel()]
    result = " + ".join([*(same or ["h"]), *(f"{each}.mean()" for each in rest)])
    result = draw.choice((result, f"h + 0.5 * ({result})", f"torch.tanh({result})"))
    own = f"Layer{len(classes)}"
    form = draw.choice(("layers", "layers", "shared", "twice", "sequential", "pair"))
    second = ", h.mean(-1)" if form == "pair" else ""
    classes.append(class_text(own, inner, ["h"], [f"return {result}{second}"]))
    space = {**names()}
    exec("\n".join(classes), space)
    body.space |= {each: value for each, value in space.items() if each.startswith("Layer")}
    body.kinds |= inner.kinds
    many, t = draw.choice((2, 2, 3)), "{x}"
    before = f"{{t}} = {t}"
    calls = {
        "layers": f"nn.ModuleList({own}() for _ in range({many})) @ {before};for each in self.{{M}}: {{t}} = each({{t}});{{t}}",
        "shared": f"nn.ModuleList([{own}()]) @ {before};for _ in range({many}): {{t}} = self.{{M}}[0]({{t}});{{t}}",
        "twice": f"nn.ModuleList([{own}()]) @ self.{{M}}[0]({t}) - self.{{M}}[0]({t} * 0.5)",
        "sequential": f"nn.Sequential({own}(), {own}()) @ self.{{M}}({t})",
        "pair": f"nn.ModuleList([{own}(), {own}()]) @ {{t}}, {{u}} = self.{{M}}[0]({t});self.{{M}}[1]({{t}})[0] + {{u}}.sum()",
    }
    body.attempt(calls[form].replace("{x}", name))


def class_text(name: str, body: Body, inputs: list[str], returned: list[str]) -> str:
    made = "".join(f"\n{INSIDE}{line}" for line in body.made)
    lines = "".join(f"\n{INSIDE}{line}" for line in (*body.lines, *returned))
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n{INSIDE}super().__init__(){made}\n\n"
        f"    def forward(self, {', '.join(inputs)}):{lines}\n"
    )


def model_of(written: Written, seed: int, path: str = "") -> nn.Module:
    """The model in float64, with weights of the seed."""
    space: dict[str, Any] = {"__name__": f"fuzzed_{seed}"}
    exec(compile(written.text, path or f"fuzzed_{seed}.py", "exec"), space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = space["Model"]().double()
    return model.train(written.training)
