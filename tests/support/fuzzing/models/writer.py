"""Writes the text of a random model: each statement is drawn, tried on example tensors, and kept where it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.fuzzing.models.statements import LOSS_STATEMENTS, STATEMENTS

SIZES = (1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 8, 8, 12)
BATCHES = (1, 2, 3, 4, 4, 4, 4, 6, 8, 8, 8)
MOST_ELEMENTS, LARGEST, TRIES = 1500, 30.0, 12
HEAD = """import torch
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


def names() -> dict[str, Any]:
    """What the text of a model may name."""
    return {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "Plain": lambda tensor: tensor}


@dataclass(slots=True)
class Body:
    """The body of one forward as it is written. `live` is a module to try statements on, `values` what they gave."""

    draw: Random
    live: nn.Module
    values: dict[str, Tensor]
    given: frozenset[str]
    space: dict[str, Any]
    made: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    count: int = 0

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def statement(self, kind: str = "") -> str | None:
        """Adds a statement, and gives the name of its value; None where none of a few draws runs."""
        kinds = list(STATEMENTS)
        for _ in range(TRIES):
            chosen = kind or self.draw.choices(kinds, [weight for _, weight in STATEMENTS.values()])[0]
            name = self.attempt(self.draw.choice(STATEMENTS[chosen][0]))
            if name is not None:
                self.kinds.add(chosen)
                return name
        return None

    def attempt(self, template: str) -> str | None:
        """Fills the slots and runs it."""
        slots = self.slots(template)
        if slots is None:
            return None
        module = self.fresh("m") if template.startswith(("nn.", "Plain(")) else ""
        slots["M"] = module
        try:
            filled = template.format(**slots)
        except (KeyError, IndexError, ValueError):
            return None
        maker, body = filled.split(" @ ", 1) if module else ("", filled)
        *before, value = body.split(";")
        result = self.fresh()
        lines = [*before, f"{result} = {value}"]
        space = {**names(), **self.space, **self.values, "self": self.live}
        try:
            if module:
                made = eval(maker, space)
                if isinstance(made, nn.Module):
                    made.double().train(self.live.training)
                elif isinstance(made, nn.Parameter):
                    made = nn.Parameter(made.double(), made.requires_grad)
                elif isinstance(made, nn.Buffer):
                    made = nn.Buffer(made.double())
                else:
                    made = made.double()
                setattr(self.live, module, made)
            exec("\n".join(lines), space)
            if not fits(space[result]):
                raise ValueError
        except Exception:
            if module and hasattr(self.live, module):
                delattr(self.live, module)
            return None
        if module:
            maker = maker.removeprefix("Plain") if maker.startswith("Plain") else maker
            self.made.append(f"self.{module} = {maker}")
        self.lines += lines
        self.keep(result, space[result], [str(slots[each]) for each in "xyzmn" if each in slots and f"{{{each}}}" in template])
        return result

    def keep(self, name: str, value: Tensor, read: list[str]) -> None:
        self.values[name] = value
        self.unused = [each for each in self.unused if each not in read]
        if value.is_floating_point():
            self.unused.append(name)

    def slots(self, template: str) -> dict[str, Any] | None:
        floats = [name for name, value in self.values.items() if value.is_floating_point()]
        whole = [name for name, value in self.values.items() if value.dtype is torch.int64]
        masks = [name for name, value in self.values.items() if value.dtype is torch.bool]
        if not floats or ("{n}" in template and not whole) or ("{m}" in template and not masks):
            return None
        draw = self.draw
        recent = self.unused[-3:] or floats
        out: dict[str, Any] = {"x": draw.choice(recent if draw.random() < 0.7 else floats)}
        x = self.values[out["x"]]
        near = [name for name in floats if broadcasts(self.values[name], x)]
        for slot in "yz":
            out[slot] = draw.choice(near if draw.random() < 0.85 else floats)
        out |= {"n": draw.choice(whole or [""]), "m": draw.choice(masks or [""])}
        for slot in "de":
            out[slot] = draw.randrange(-x.dim(), x.dim()) if x.dim() else 0
        out["size"] = x.shape[out["d"]] if x.dim() else 1
        out["last"] = x.shape[-1] if x.dim() else 1
        out["rows"] = x.shape[-2] if x.dim() > 1 else 1
        out["chan"] = x.shape[1] if x.dim() > 1 else 1
        out |= {"o": draw.choice(SIZES), "k": draw.randrange(3)}
        if any(f"{{{each}}}" in template for each in "tuv"):
            out |= {each: self.fresh("t") for each in "tuv"}
        return out


def broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(i == j or 1 in (i, j) for i, j in zip(reversed(a.shape), reversed(b.shape), strict=False))


def fits(value: Any) -> bool:
    """Whether a value is a tensor that further statements can take."""
    if not isinstance(value, Tensor) or not 0 < value.numel() <= MOST_ELEMENTS or value.dim() > 5:
        return False
    if value.is_floating_point():
        return value.dtype is torch.float64 and bool(value.isfinite().all()) and float(value.detach().abs().max()) < LARGEST
    return value.dtype in (torch.int64, torch.bool)


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
        if body.attempt("nn.Embedding(7, {o}) @ self.{M}({n})".replace("{n}", "{n}")) is None:
            body.values["a0"] = torch.zeros(())
            name = f"self.{body.fresh('m')}"
            ids = draw.choice([each for each in body.values if body.values[each].dtype is torch.int64])
            size = draw.choice(SIZES)
            setattr(live, name[5:], nn.Embedding(7, size).double())
            body.made.append(f"{name} = nn.Embedding(7, {size})")
            value = body.fresh()
            body.lines.append(f"{value} = {name}({ids})")
            body.keep(value, getattr(live, name[5:])(body.values[ids]), [])
            del body.values["a0"]
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
        return [f"return {other}, {loss}"], value
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
    second = f", h.mean(-1)" if form == "pair" else ""
    classes.append(class_text(own, inner, ["h"], [f"return {result}{second}"]))
    space = {**names()}
    exec("\n".join(classes), space)
    body.space |= {each: value for each, value in space.items() if each.startswith("Layer")}
    body.kinds |= inner.kinds
    many, t = draw.choice((2, 2, 3)), "{x}"
    calls = {
        "layers": f"nn.ModuleList({own}() for _ in range({many})) @ {{t}} = {t};for each in self.{{M}}: {{t}} = each({{t}});{{t}}",
        "shared": f"nn.ModuleList({own}() for _ in range(1)) @ {{t}} = {t};for _ in range({many}): {{t}} = self.{{M}}[0]({{t}});{{t}}",
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
