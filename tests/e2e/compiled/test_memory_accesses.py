"""Memory traffic of compiled blocks: the cost model, inductor's own count of our program, and of the model as it was written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from benchmarks.plain_llama import Llama, LlamaSizes
from support.harness.training_loop import loss_of, parallel_model
from support.judges.inductor_traffic import CountingInductor, KernelBytes
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor, nn

from autopar.cost_models.compute.kernel_accesses import _MOST_READS, kernel_accesses
from autopar.cost_models.tensors.sizes import value_bytes
from autopar.dryrun.compat import fake_group
from autopar.ir.graph import Block, Graph
from autopar.ir.plan import Precision
from autopar.options import PlanOptions
from autopar.plan_inputs import capture_for
from autopar.program.build import program_text

BATCH, SEQUENCE, HIDDEN, INNER, HEADS, GROUPS, WORDS = 2, 512, 1024, 2816, 16, 4, 512
LAYER = 1
"""The index of the layer among the blocks: after the embedding."""
BF16 = Precision("bfloat16", "bfloat16")


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            vocab_size=WORDS,
        )
    )


def gpt2() -> nn.Module:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS, "n_positions": SEQUENCE}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **no_dropout))


def bert() -> nn.Module:
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 4 * HIDDEN}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=WORDS, **no_dropout))


def plain_llama() -> nn.Module:
    return Llama(LlamaSizes(HIDDEN, INNER, 2, HEADS, GROUPS, WORDS), SEQUENCE)


MODELS = {make.__name__: make for make in (llama, plain_llama, gpt2, bert)}


def prepare(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16)
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE))
    others = inspect.signature(model.forward).parameters
    return model, dict.fromkeys(("input_ids", "labels") if isinstance(model, transformers.PreTrainedModel) else others, ids)


@cache
def captured(name: str) -> tuple[Graph, dict[bool, KernelBytes]]:
    """The graph of a model, and what inductor counts of the forward and the backward of its layer in our program."""
    model, batch = prepare(name)
    graph = capture_for(model, batch, PlanOptions(), BF16)
    plan = drawn_candidate(graph, mesh_of(dp=1), 1, zero=0, wild=0.0, precision=BF16)
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return graph, counted(lambda backend: parallel_model(program_text(graph, plan), state, compile=backend), batch)[LAYER]


def counted(program: Any, batch: Mapping[str, Tensor]) -> list[dict[bool, KernelBytes]]:
    inductor = CountingInductor()
    torch._dynamo.reset()
    with fake_group(0, 1):
        loss_of(program(inductor)(**batch)).backward()
    return inductor.blocks


def modelled(block: Block, batch: int) -> dict[bool, float]:
    """Bytes of the streaming kernels of the forward and of the backward (True)."""
    values, nodes = block.values(), {node.name: node for node in block.nodes}
    out = {False: 0.0, True: 0.0}
    for (name, field, index), count in kernel_accesses(block, batch).items():
        side, what = field.split("_")
        value = nodes[name].operands()[index] if what == "operands" else nodes[name].outputs[index].name
        out[side == "backward"] += count * value_bytes(values[value], batch)
    return out


SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "within"), [("plain_llama", 0.1), SLOW("llama", 0.01), SLOW("gpt2", 0.01), SLOW("bert", 0.15)])
def test_the_cost_model_counts_what_inductor_counts(name: str, within: float) -> None:
    graph, count = captured(name)
    bytes_of = modelled(graph.blocks[LAYER], BATCH)
    assert bytes_of[False] == pytest.approx(count[False].all_bytes, rel=within)
    assert bytes_of[True] == pytest.approx(count[True].all_bytes - count[True].row_sum_bytes, rel=within)


def test_values_of_many_tensors_are_written_as_inductor_writes_them() -> None:
    """Seen on 2.13.0."""
    assert torch._inductor.config.realize_reads_threshold == _MOST_READS


def test_the_program_has_no_more_traffic_than_the_model_as_it_was_written() -> None:
    model, batch = prepare("plain_llama")
    inductor = CountingInductor()
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend=inductor)
    model(**batch).backward()
    _, ours = captured("plain_llama")
    assert inductor.blocks[0].keys() == ours.keys() == {False, True}
    for backward, count in inductor.blocks[0].items():
        assert ours[backward].all_bytes <= 1.1 * count.all_bytes
