"""A model, and texts of programs in pipeline stages for it as the compiler would write them.

Its embedding is tied to the head, a mask goes from stage to stage without a gradient, and the embedded words go to the last one
unchanged; labels are ignored unevenly.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.plan import Pipeline
from autopar.program.load import load_program
from autopar.schedules.communicate import with_communication
from autopar.schedules.pipeline_schedule import schedule_of
from support.harness.comparison import Outcome, differences

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
from autopar.runtime.module import BlockModule, ParameterSpec
from autopar.runtime.pipeline.stage_modules import BoundaryTensor, ModelChunk
from autopar.runtime.pipeline.stage_modules import PipelineProgram as Base

V, H, S, HEADS = 24, 8, 6, 2
D = "{master}"


class Embed(BlockModule):
    zero = {zero}
    specs = (ParameterSpec("embed.weight", (V, H), D),)

    def forward(self, ids):
        words = F.embedding(ids, self.embed_weight.to(torch.{compute}))
        mask = (ids != 0)[:, None, None, :] & torch.ones(S, S, dtype=torch.bool, device=ids.device).tril()
        return words, mask


class Layer(BlockModule):
    zero = {zero}
    recompute = {recompute}
    specs = (
        ParameterSpec("norm.weight", (H,), D),
        ParameterSpec("norm.bias", (H,), D),
        ParameterSpec("qkv.weight", (3 * H, H), D),
        ParameterSpec("qkv.bias", (3 * H,), D),
        ParameterSpec("out.weight", (H, H), D),
        ParameterSpec("out.bias", (H,), D),
        ParameterSpec("up.weight", (2 * H, H), D, {{"tp": "S(0)"}}),
        ParameterSpec("up.bias", (2 * H,), D, {{"tp": "S(0)"}}),
        ParameterSpec("down.weight", (H, 2 * H), D, {{"tp": "S(1)"}}),
        ParameterSpec("down.bias", (H,), D),
        ParameterSpec("scale", (), D),
        ParameterSpec("steps", (1,), D, buffer=True),
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


class Head(BlockModule):
    zero = {zero}
    specs = (ParameterSpec("norm.weight", (H,), D), ParameterSpec("norm.bias", (H,), D), ParameterSpec("head.weight", (V, H), D))

    def forward(self, x, words, labels, count):
        dp, tp, t = self.mesh.dp, self.mesh.tp, x.dtype
        x = F.layer_norm(x, (H,), self.norm_weight.to(t), self.norm_bias.to(t)) + words * 0.1
        weight = C.convert(self.head_weight.to(t), tp, "I -> S(0)")
        logits = {linear}(C.convert(x, tp, "I -> R"), weight)
        total = C.cross_entropy_sharded(logits, labels, -100, 0.0, tp)
        return C.convert(total, dp, "P -> I") / count


class Count(BlockModule):
    def forward(self, labels):
        return C.convert(C.count_valid(labels), self.mesh.dp, "P -> R")


BOUNDARY = (
    BoundaryTensor("x", lambda B: (B, S, H), "{compute}"),
    BoundaryTensor("mask", lambda B: (B, 1, S, S), "bool", gradient=False),
    BoundaryTensor("words", lambda B: (B, S, H), "{compute}"),
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

    def micro_batch_size(self, ids, labels):
        return ids.shape[0]

    def count(self, ids, labels):
        return {{"count": self.valid(labels)}}
"""


def _chunk(index: int, chunks: int, layers: range) -> str:
    """The class of one chunk."""
    first, last = index == 0, index + 1 == chunks
    batch_inputs = (["ids"] if first else []) + (["labels", "count"] if last else [])
    received = [] if first else ["x", "mask", "words"]
    lines = [f"class Chunk{index}(ModelChunk):", f"    batch_inputs = {tuple(batch_inputs)}", "", "    def __init__(self, mesh):"]
    lines += ["        super().__init__(mesh)"]
    lines += ['        self.embed = Embed(mesh, "")'] if first else []
    lines += [f'        self.layers = nn.ModuleList(Layer(mesh, f"layers.{{i}}") for i in range({layers.start}, {layers.stop}))']
    lines += ['        self.head = Head(mesh, "", {"head.weight": "embed.weight"})'] if last else []
    lines += ["", f"    def forward(self, {', '.join((*received, *batch_inputs))}):"]
    lines += ["        words, mask = self.embed(ids)", "        x = words"] if first else []
    lines += ["        for layer in self.layers:", "            x = layer(x, mask)"]
    lines += ["        return self.head(x, words, labels, count)" if last else "        return x, mask, words"]
    return "\n\n\n" + "\n".join(lines) + "\n"


def pipeline_text(
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
    linear = "self.split_backward.linear" if any("W" in line for line in schedule) else "F.linear"
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


def built_schedule(name: str, ranks: int, many: int, virtual: int = 1, zero: int | None = None) -> tuple[str, ...]:
    """The lines of a schedule by name, with communication and, with `zero`, what state sharding adds."""
    schedule = schedule_of(Pipeline(ranks, virtual, name), many)
    full = with_communication(schedule, None if zero is None else (zero,) * (ranks * virtual))
    return tuple(str(full).splitlines())


def gpipe_schedule(places: tuple[tuple[int, ...], ...], many: int, split: bool = False) -> tuple[str, ...]:
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


def pipeline_differences(
    found: list[list[tuple[Outcome, tuple[str, ...]]]], program: str, index: int, expected: Outcome, tolerance: float = 1e-9
) -> list[str]:
    """What differs from one process on any rank, and ranks that computed something else than their line says."""
    lines = load_program(program).Program.schedule
    size = len(found) // len(lines)
    out = []
    for rank, answers in enumerate(found):
        outcome, trace = answers[index]
        out += [f"rank {rank}: {text}" for text in differences(outcome._replace(buffers={}), expected, tolerance)]
        if trace != tuple(word for word in lines[rank // size].split() if COMPUTE.fullmatch(word)):
            out.append(f"rank {rank} computed {trace}")
    return out
