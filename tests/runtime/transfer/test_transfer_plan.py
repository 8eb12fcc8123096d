"""Plans of weight transfers, followed on tensors of one process: every element once, within the memory, near the bounds."""

from __future__ import annotations

import random
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch

from autopar.capture.models import load_model
from autopar.planning import make_plan
from autopar.runtime.errors import TransferProblem
from autopar.runtime.transfer.transfer_plan import TransferPlan, plan_transfer
from autopar.runtime.transfer.vllm_layout import VllmLayout
from autopar.runtime.transfer.weight_layout import AxisShard, TensorLayout, WeightLayout
from autopar.runtime.transfer.weight_transfer import _copy, receive_weights
from autopar.weight_transfer import plan_weight_transfer


def drawn_layout(draw: random.Random, shapes: dict[str, tuple[int, ...]]) -> WeightLayout:
    """Of a mesh of stages, data and model axes; parts, uneven ZeRO, copies."""
    axes = {"pp": draw.choice([1, 1, 2]), "dp": draw.choice([1, 2, 3]), "tp": draw.choice([1, 2, 4])}
    tensors = {}
    for name, shape in shapes.items():
        shards = []
        if shape and draw.random() < 0.7:
            copies = draw.choice([each for each in (1, 2) if axes["tp"] % each == 0])
            parts = draw.choice([1, 1, 3])
            shards.append(AxisShard("tp", draw.randrange(len(shape)), parts, copies))
        if shape and draw.random() < 0.6:
            dim = draw.randrange(len(shape))
            extent = shape[dim]
            for each in shards:
                extent //= axes["tp"] // each.copies if each.dim == dim else 1
            shards.append(AxisShard("dp", dim, width=-(-extent // axes["dp"])))
        stages = (draw.randrange(2),) if axes["pp"] == 2 and draw.random() < 0.8 else ()
        tensors[name] = TensorLayout("float32" if name != "b" else "int64", shape, tuple(shards), stages)
    return WeightLayout(axes, tensors)


def part(layout: WeightLayout, name: str, rank: int, full: torch.Tensor) -> torch.Tensor | None:
    """What a rank holds, by indexing: the oracle of `spans`' order."""
    spans = layout.spans(layout.tensors[name], rank)
    if spans is None:
        return None
    for dim, each in enumerate(spans):
        full = full.index_select(dim, torch.tensor([i for start, n in each for i in range(start, start + n)], dtype=torch.long))
    return full.clone()


def follow(plan: TransferPlan, source: WeightLayout, target: WeightLayout, full: dict[str, torch.Tensor]) -> None:
    """All slices of all rounds, through buffers; then every receiver has what it should."""
    held = [{name: part(source, name, rank, each) for name, each in full.items()} for rank in range(source.size)]
    got = [{n: v if v is None else torch.zeros_like(v) - 1 for n, v in
            ((name, part(target, name, rank, each)) for name, each in full.items())} for rank in range(target.size)]  # fmt: skip
    for sends in plan.rounds:
        for send in sends:
            buffer = torch.empty(send.nbytes, dtype=torch.uint8)
            _copy([send], buffer, {n: v for n, v in held[send.source].items() if v is not None}, source, pack=True)
            _copy([send], buffer, {n: v for n, v in got[send.target].items() if v is not None}, target, pack=False)
    for rank in range(target.size):
        for name, each in full.items():
            expected = part(target, name, rank, each)
            assert expected is None or torch.equal(got[rank][name], expected), (name, rank)  # type: ignore[arg-type]


def check_bounds(plan: TransferPlan, target: WeightLayout, full: dict[str, torch.Tensor]) -> None:
    lacking = [part(target, name, rank, each) for rank in range(target.size) for name, each in full.items()]
    assert plan.nbytes == plan.lower_bound_bytes == sum(each.nbytes for each in lacking if each is not None)
    for sends in plan.rounds:
        loads = Counter[tuple[bool, int]]()
        for send in sends:
            loads[True, send.source] += send.nbytes
            loads[False, send.target] += send.nbytes
        assert max(loads.values()) <= plan.memory_bytes
    assert plan.lower_bound_seconds(1.0) <= plan.seconds(1.0)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_layouts(seed: int) -> None:
    draw = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (24, 12), "b": (12, 24, 12), "c": (36,), "d": ()}
    full = {name: torch.arange(prod(shape)).reshape(shape).to(torch.int64 if name == "b" else torch.float32)
            for name, shape in shapes.items()}  # fmt: skip
    source, target = drawn_layout(draw, shapes), drawn_layout(draw, shapes)
    plan = plan_transfer(source, target, draw.choice([256, 1024, 2**20]))
    follow(plan, source, target, full)
    check_bounds(plan, target, full)
    assert WeightLayout.from_json(source.to_json()) == source


def replicated(ranks: int, tensors: int) -> WeightLayout:
    return WeightLayout({"dp": ranks}, {f"layer.{n}": TensorLayout("float32", (64, 64)) for n in range(tensors)})


@pytest.mark.parametrize(("senders", "receivers"), [(4, 4), (2, 4), (4, 1), (3, 2)])
def test_replicas_share_the_work(senders: int, receivers: int) -> None:
    """Replicated weights to replicated weights: all senders are as busy as the bound says, to a slice, and so are the rounds."""
    plan = plan_transfer(replicated(senders, 12), replicated(receivers, 12), 2**14)
    sent = Counter[int]()
    for send in (send for each in plan.rounds for send in each):
        sent[send.source] += send.nbytes
    assert len(sent) == senders and max(sent.values()) - min(sent.values()) <= 2**12
    assert plan.busiest_bytes <= max(sent.values()) <= plan.busiest_bytes + 2**12 or receivers < senders
    assert plan.seconds(1.0) <= 1.5 * plan.lower_bound_seconds(1.0)


def test_the_host_of_the_receiver_sends() -> None:
    plan = plan_transfer(replicated(2, 8), replicated(2, 8), 2**20, (["here", "there"], ["there", "here"]))
    assert {(send.source, send.target) for each in plan.rounds for send in each} == {(0, 1), (1, 0)}


def other(layout: WeightLayout, **changes: TensorLayout) -> WeightLayout:
    return layout._replace(tensors={**layout.tensors, **changes})


@pytest.mark.parametrize(("tensor", "words"), [
    (None, "the job that receives has extra"),
    (TensorLayout("bfloat16", (4,)), r"send_weights\(dtype=torch.bfloat16\)"),
    (TensorLayout("float32", (5,)), "has shape"),
])  # fmt: skip
def test_layouts_that_do_not_fit(tensor: TensorLayout | None, words: str) -> None:
    base = WeightLayout({"dp": 2}, {"w": TensorLayout("float32", (4,))})
    changed = other(base, extra=TensorLayout("float32", (4,))) if tensor is None else other(base, w=tensor)
    with pytest.raises(TransferProblem, match=words) as raised:
        plan_transfer(base, changed, 1024)
    assert "\n" not in str(raised.value)


# -- vLLM


HEADS, KV, SIZE, HIDDEN, INNER, WORDS = 8, 2, 4, 32, 48, 100
SHAPES = {
    "model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,),
    "l.self_attn.v_proj.weight": (KV * SIZE, HIDDEN), "l.self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "l.self_attn.k_proj.weight": (KV * SIZE, HIDDEN), "l.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
    "l.self_attn.q_proj.bias": (HEADS * SIZE,), "l.self_attn.k_proj.bias": (KV * SIZE,), "l.self_attn.v_proj.bias": (KV * SIZE,),
    "l.self_attn.o_proj.bias": (HIDDEN,), "l.self_attn.q_norm.weight": (SIZE,),
    "l.mlp.up_proj.weight": (INNER, HIDDEN), "l.mlp.gate_proj.weight": (INNER, HIDDEN), "l.mlp.down_proj.weight": (HIDDEN, INNER),
}  # fmt: skip


def worker(full: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    """The parameters of a worker of vLLM, cut and joined by hand as its weight loaders do."""

    def cut(x: torch.Tensor, dim: int, ranks: int, at: int) -> torch.Tensor:
        return x.chunk(ranks, dim)[at]

    kv_ranks = min(tp, KV)
    out = {}
    for end in ("weight", "bias"):
        q, k, v = (full[f"l.self_attn.{p}_proj.{end}"] for p in "qkv")
        own = [cut(q, 0, tp, rank), *(cut(x, 0, kv_ranks, rank * kv_ranks // tp) for x in (k, v))]
        out[f"l.self_attn.qkv_proj.{end}"] = torch.cat(own)
    out["l.mlp.gate_up_proj.weight"] = torch.cat([cut(full[f"l.mlp.{p}_proj.weight"], 0, tp, rank) for p in ("gate", "up")])
    for name in ("l.self_attn.o_proj.weight", "l.mlp.down_proj.weight"):
        out[name] = cut(full[name], 1, tp, rank)
    for name in ("model.norm.weight", "l.self_attn.o_proj.bias", "l.self_attn.q_norm.weight"):
        out[name] = full[name]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.cat([full[name], torch.zeros(128 - WORDS, HIDDEN)])
        out[name] = cut(padded, 0, tp, rank)
    return {name: each.clone() for name, each in out.items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_layout(tp: int) -> None:
    """Each worker's tensors, filled slice by slice, are those that are cut by hand."""
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    source = WeightLayout({"dp": 2}, {n: TensorLayout("float32", s, (AxisShard("dp", 0, width=-(-s[0] // 2)),))
                                      for n, s in SHAPES.items()})  # fmt: skip
    target = VllmLayout(tp, KV).of(source)
    plan = plan_transfer(source, target, 2**12)
    workers = [worker(full, rank, tp) for rank in range(tp)]
    empty = [{name: torch.zeros_like(each) for name, each in own.items()} for own in workers]
    for send in (send for sends in plan.rounds for send in sends):
        buffer = torch.empty(send.nbytes, dtype=torch.uint8)
        own = {send.part.name: part(source, send.part.name, send.source, full[send.part.name])}
        _copy([send], buffer, own, source, pack=True)  # type: ignore[arg-type]
        _copy([send], buffer, target.views(send.target, empty[send.target]), target, pack=False)
    for own, expected in zip(empty, workers, strict=True):
        assert all(torch.equal(own[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("tp", "name", "shape", "words"), [
    (3, "l.self_attn.k_proj.weight", (KV * SIZE, HIDDEN), "2 heads of keys and values do not divide by tp=3"),
    (2, "l.mlp.up_proj.weight", (INNER + 1, HIDDEN), "does not divide by tp=2"),
    (2, "l.mixer.conv1d.weight", (4, 4), "is of no kind"),
])  # fmt: skip
def test_vllm_refuses(tp: int, name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(TransferProblem, match=words):
        VllmLayout(tp, KV).of(WeightLayout({"dp": 1}, {name: TensorLayout("float32", shape)}))


@pytest.mark.parametrize("layout", [VllmLayout(0, KV), VllmLayout(2, 0), VllmLayout(-1, KV), VllmLayout("2", KV)])  # type: ignore[arg-type]
def test_no_numbers_of_ranks_and_heads(layout: VllmLayout) -> None:
    with pytest.raises(TransferProblem, match="each 1 or more"):
        layout.of(WeightLayout({"dp": 1}, {"l.self_attn.k_proj.weight": TensorLayout("float32", (KV * SIZE, HIDDEN))}))


@pytest.mark.parametrize(
    ("layout", "rank", "words"),
    [(None, 0, "pass autopar.VllmLayout"), (VllmLayout(2, KV), 2, "none of the 2"), (VllmLayout(2, KV), "0", "none of the 2")],
)
def test_no_layout_or_rank_that_receives(layout: Any, rank: Any, words: str) -> None:
    with pytest.raises(TransferProblem, match=words):
        receive_weights("localhost:1", {}, layout, rank=rank)


@pytest.mark.parametrize("memory", [0, 63, 2.5e6, float("nan"), "1", None, True])
def test_no_memory_for_buffers(memory: Any) -> None:
    layout = WeightLayout({"dp": 1}, {"a": TensorLayout("float32", (4,))})
    with pytest.raises(TransferProblem, match="is no memory for buffers"):
        plan_transfer(layout, layout, memory)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.int32, 16])
def test_no_dtype_of_weights(dtype: Any) -> None:
    loaded = load_model("gpt2-tiny", 4)
    plan = make_plan(loaded.model, "local:2", loaded.example_inputs, force="dp=2,zero=0")
    with pytest.raises(TransferProblem, match="is no floating-point dtype"):
        plan_weight_transfer(plan, plan, dtype=dtype)


@pytest.mark.parametrize("change", ["missing", "more", "dtype", "rows", "width"])
def test_tensors_of_another_layout(change: str) -> None:
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    layout = VllmLayout(2, KV).of(WeightLayout({"dp": 1}, {n: TensorLayout("float32", s) for n, s in SHAPES.items()}))
    tensors, key = worker(full, 0, 2), "l.self_attn.qkv_proj.weight"
    layout.views(0, tensors)
    if change == "missing":
        del tensors[key]
    elif change == "more":
        tensors["other"] = torch.zeros(1)
    else:
        before = tensors[key]
        tensors[key] = {"dtype": before.half(), "rows": torch.cat([before, before[:1]]), "width": before[:, 1:]}[change]
    with pytest.raises(TransferProblem, match="other" if change == "more" else "self_attn"):
        layout.views(0, tensors)
