"""A model, and texts of programs in pipeline stages for it as the compiler would write them.

Its embedding is tied to the head, a mask goes from stage to stage without a gradient, and the embedded words go to the last one
unchanged; labels are ignored unevenly.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from support.endtoend import Outcome, differences
from torch import nn

from autopar.ir.plan import Pipeline
from autopar.program.build import load
from autopar.schedules.build import schedule_of
from autopar.schedules.communicate import with_communication

V, H, S, HEADS = 24, 8, 6, 2
COMPUTE = re.compile(r"\d+[FBIW]\d+")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.qkv = nn.Linear(H, 3 * H)
        self.out = nn.Linear(H, H)
        self.up = nn.Linear(H, 2 * H)
        self.down = nn.Linear(2 * H, H)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        x = x + self.scale * self.out(y)
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        words = x = self.embed(ids)
        mask = (ids != 0)[:, None, None, :] & torch.ones(S, S, dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x) + words * 0.1
        return F.cross_entropy(self.head(x).reshape(-1, V), labels.reshape(-1))


def model(layers: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(layers).double()


def batch(seed: int = 0, examples: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {name: torch.randint(1, V, (examples, S), generator=generator) for name in ("ids", "labels")}
    out["ids"][1, 4:], out["labels"][0], out["labels"][5, :2] = 0, -100, -100
    return out


BLOCKS = '''"""Written by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import collectives as C
from autopar.runtime.module import Block, Parameter
from autopar.runtime.pipeline import Boundary, Chunk
from autopar.runtime.pipeline import Pipeline as Base

V, H, S, HEADS = 24, 8, 6, 2
D = "{master}"


class Embed(Block):
    zero = {zero}
    specs = (Parameter("embed.weight", (V, H), D),)

    def forward(self, ids):
        words = F.embedding(ids, self.embed_weight.to(torch.{compute}))
        mask = (ids != 0)[:, None, None, :] & torch.ones(S, S, dtype=torch.bool, device=ids.device).tril()
        return words, mask


class Layer(Block):
    zero = {zero}
    recompute = {recompute}
    specs = (
        Parameter("norm.weight", (H,), D),
        Parameter("norm.bias", (H,), D),
        Parameter("qkv.weight", (3 * H, H), D),
        Parameter("qkv.bias", (3 * H,), D),
        Parameter("out.weight", (H, H), D),
        Parameter("out.bias", (H,), D),
        Parameter("up.weight", (2 * H, H), D, {{"tp": "S(0)"}}),
        Parameter("up.bias", (2 * H,), D, {{"tp": "S(0)"}}),
        Parameter("down.weight", (H, 2 * H), D, {{"tp": "S(1)"}}),
        Parameter("down.bias", (H,), D),
        Parameter("scale", (), D),
        Parameter("steps", (1,), D, buffer=True),
    )

    def forward(self, x, mask):
        tp, t = self.mesh.tp, x.dtype
        if self.training:
            with torch.no_grad():
                self.steps.copy_(self.steps + 1)
        y = F.layer_norm(x, (H,), self.norm_weight.to(t), self.norm_bias.to(t))
        heads = {linear}(y, self.qkv_weight.to(t), self.qkv_bias.to(t))
        heads = heads.view(*x.shape[:2], 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        x = x + self.scale.to(t) * {linear}(y, self.out_weight.to(t), self.out_bias.to(t))
        y = C.convert(x, tp, "I -> R")
        y = {linear}(y, self.up_weight.to(t), self.up_bias.to(t)).tanh()
        y = {linear}(y, self.down_weight.to(t))
        return x + C.convert(y, tp, "P -> I") + self.down_bias.to(t)


class Head(Block):
    zero = {zero}
    specs = (Parameter("norm.weight", (H,), D), Parameter("norm.bias", (H,), D), Parameter("head.weight", (V, H), D))

    def forward(self, x, words, labels, count):
        dp, tp, t = self.mesh.dp, self.mesh.tp, x.dtype
        x = F.layer_norm(x, (H,), self.norm_weight.to(t), self.norm_bias.to(t)) + words * 0.1
        weight = C.convert(self.head_weight.to(t), tp, "I -> S(0)")
        logits = {linear}(C.convert(x, tp, "I -> R"), weight)
        total = C.cross_entropy_sharded(logits, labels, -100, 0.0, tp)
        return C.convert(total, dp, "P -> I") / count


class Count(Block):
    def forward(self, labels):
        return C.convert(C.count_valid(labels), self.mesh.dp, "P -> R")


BOUNDARY = (
    Boundary("x", lambda B: (B, S, H), "{compute}"),
    Boundary("mask", lambda B: (B, 1, S, S), "bool", gradient=False),
    Boundary("words", lambda B: (B, S, H), "{compute}"),
)
'''

PROGRAM = """

class Program(Base):
    mesh_axes = {axes}
    input_placements = {{"ids": {{"dp": "S(0)"}}, "labels": {{"dp": "S(0)"}}}}
    precision = ("{compute}", "{master}")
    loss_dtype = "{loss}"
    micro_batches = {many}
    zero_group = {group}
    totals = {{"count": "sum"}}
    chunks = ({chunks})
    boundaries = ({boundaries})
    schedule = {schedule}

    def __init__(self, mesh):
        super().__init__(mesh)
        self.valid = Count(mesh, "")

    def examples(self, ids, labels):
        return ids.shape[0]

    def count(self, ids, labels):
        return {{"count": self.valid(labels)}}
"""


def _chunk(index: int, chunks: int, layers: range) -> str:
    """The class of one chunk."""
    first, last = index == 0, index + 1 == chunks
    takes = (["ids"] if first else []) + (["labels", "count"] if last else [])
    received = [] if first else ["x", "mask", "words"]
    lines = [f"class Chunk{index}(Chunk):", f"    takes = {tuple(takes)}", "", "    def __init__(self, mesh):"]
    lines += ["        super().__init__(mesh)"]
    lines += ['        self.embed = Embed(mesh, "")'] if first else []
    lines += [f'        self.layers = nn.ModuleList(Layer(mesh, f"layers.{{i}}") for i in range({layers.start}, {layers.stop}))']
    lines += ['        self.head = Head(mesh, "", {"head.weight": "embed.weight"})'] if last else []
    lines += ["", f"    def forward(self, {', '.join((*received, *takes))}):"]
    lines += ["        words, mask = self.embed(ids)", "        x = words"] if first else []
    lines += ["        for layer in self.layers:", "            x = layer(x, mask)"]
    lines += ["        return self.head(x, words, labels, count)" if last else "        return x, mask, words"]
    return "\n\n\n" + "\n".join(lines) + "\n"


def text(
    schedule: tuple[str, ...],
    many: int,
    *,
    zero: int = 0,
    group: int = 0,
    layers: int = 4,
    recompute: bool = False,
    compute: str = "float64",
    master: str = "float64",
    **axes: int,
) -> str:
    """The program of a schedule, whose lines have communication."""
    count = 1 + max(int(word.split("F")[0]) for line in schedule for word in line.split() if "_" not in word and "F" in word)
    linear = "self.later.linear" if any("W" in line for line in schedule) else "F.linear"
    cuts = [layers * index // count for index in range(count + 1)]
    blocks = BLOCKS.format(zero=zero, recompute=recompute, compute=compute, master=master, linear=linear)
    classes = "".join(_chunk(index, count, range(cuts[index], cuts[index + 1])) for index in range(count))
    names = "".join(f"Chunk{index}, " for index in range(count))
    made = PROGRAM.format(
        axes={"pp": len(schedule), **(axes or {"dp": 1})},
        compute=compute,
        loss="float32" if compute == "bfloat16" else compute,
        master=master,
        many=many,
        group=group,
        chunks=names,
        boundaries="BOUNDARY, " * (count - 1),
        schedule=repr(schedule),
    )
    return blocks + classes + made


def with_messages(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Computation with its communication, the simplest way: a receive right before what needs it."""
    owner = {int(word.split("F")[0]): rank for rank, line in enumerate(lines) for word in line.split() if "F" in word}
    last = max(owner)
    out = []
    for rank, line in enumerate(lines):
        words = []
        for word in line.split():
            kind = next(letter for letter in "FBIW" if letter in word)
            chunk, number = map(int, word.split(kind))
            if kind == "F" and chunk and owner[chunk - 1] != rank:
                words.append(f"{chunk}RECV_F{number}")
            if kind in "BI" and chunk < last and owner[chunk + 1] != rank:
                words.append(f"{chunk}RECV_B{number}")
            words.append(word)
            if kind == "F" and chunk < last and owner[chunk + 1] != rank:
                words.append(f"{chunk}SEND_F{number}")
            if kind in "BI" and chunk and owner[chunk - 1] != rank:
                words.append(f"{chunk}SEND_B{number}")
        out.append(" ".join(words))
    return tuple(out)


def built(name: str, ranks: int, many: int, virtual: int = 1, zero: int | None = None) -> tuple[str, ...]:
    """The lines of a schedule by name, with communication and, with `zero`, what state sharding adds."""
    schedule = schedule_of(Pipeline(ranks, virtual, name), many)
    full = with_communication(schedule, None if zero is None else (zero,) * (ranks * virtual))
    return tuple(str(full).splitlines())


def all_forward(places: tuple[tuple[int, ...], ...], many: int, split: bool = False) -> tuple[str, ...]:
    """GPipe: the chunks of each rank in turn, then backwards in reverse."""
    back = ("I", "W") if split else ("B",)
    return with_messages(
        tuple(
            " ".join(
                [f"{chunk}F{m}" for chunk in mine for m in range(many)]
                + [f"{chunk}{kind}{m}" for chunk in reversed(mine) for m in range(many) for kind in back]
            )
            for mine in places
        )
    )


Trained = tuple[Outcome, tuple[str, ...]]


def trained(
    cases: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]], compile: str = "", steps: int = 3
) -> list[Trained]:
    """On a rank: each program trained; loss, full gradients of the first step, full state after the last, and the trace."""
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    out = []
    for program, state, data in cases:
        made = load(program).Program
        parallel = Parallel(made(MeshHandle(made.mesh_axes)), state, compile=compile)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        first: tuple[float, dict[str, torch.Tensor]] | None = None
        for _ in range(steps):
            optimizer.zero_grad()
            loss = parallel(**data)
            loss.backward()
            first = first or (loss.item(), parallel.full_gradients())
            optimizer.step()
        assert first is not None
        full = {name: tensor for name, tensor in parallel.full_state().items() if "steps" not in name}
        out.append(((*first, full, {}), parallel.trace()))
    return out


def wrong(found: list[list[Trained]], program: str, index: int, expected: Outcome, tolerance: float = 1e-9) -> list[str]:
    """What differs from one process on any rank, and ranks that computed something else than their line says."""
    lines, size = load(program).Program.schedule, len(found) // len(load(program).Program.schedule)
    out = []
    for rank, answers in enumerate(found):
        outcome, trace = answers[index]
        out += [f"rank {rank}: {text}" for text in differences(outcome, expected, tolerance)]
        if trace != tuple(word for word in lines[rank // size].split() if COMPUTE.fullmatch(word)):
            out.append(f"rank {rank} computed {trace}")
    return out
