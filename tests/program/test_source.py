"""The text: deterministic, loops, names, tied parameters; the module shows its lines in tracebacks."""

from __future__ import annotations

import gc
import importlib
import linecache
import pickle
import sys
import traceback
from dataclasses import replace

import pytest
import torch
from support.models.handwritten_blocks import gpt2_graph
from support.models.mixed_graph import mixed_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.ir.graph import Call
from autopar.program.block_source import batch_size_source, shape_comment
from autopar.program.build import program_text
from autopar.program.checks import attribute_of
from autopar.program.load import load_program
from autopar.program.loops import loops_of_calls
from autopar.runtime.module import ParameterSpec


def text_of(graph_name: str = "gpt2") -> str:
    graph = mixed_graph(3) if graph_name == "mixed" else gpt2_graph(3, 16, 4, 32, 8, 8)
    return program_text(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 0, zero=3, wild=0.0))


def test_the_text_is_deterministic() -> None:
    assert text_of() == text_of()


def test_one_class_per_block_and_a_loop_over_layers() -> None:
    text = text_of()
    assert text.count("class GPT2Block(BlockModule):") == 1
    assert 'self.h = nn.ModuleList(GPT2Block(mesh, f"transformer.h.{i}") for i in range(3))' in text
    assert "        h = self.prologue(input_ids)\n        for block in self.h:\n            h = block(h)\n" in text
    assert '"wte.weight": "transformer.wte.weight"' in text


@pytest.mark.parametrize(("attribute", "variable"), [("s", "block"), ("ins", "in_"), ("cells", "cell")])
def test_a_layer_of_the_loop_has_the_name_of_its_list(attribute: str, variable: str) -> None:
    graph = gpt2_graph(3, 16, 4, 32, 8, 8)
    calls = tuple(replace(call, prefix=call.prefix.replace(".h.", f".{attribute}.")) for call in graph.calls)
    text = program_text(replace(graph, calls=calls), drawn_candidate(graph, mesh_of(dp=2, tp=2), 0, zero=3, wild=0.0))
    assert f"        for {variable} in self.{attribute}:\n            h = {variable}(h)\n" in text
    compile(text, "program", "exec")


def test_alternating_layers_are_one_loop() -> None:
    text = text_of("mixed")
    assert (
        "        for layer, centre in zip(self.layers, self.centres, strict=True):\n"
        "            m = layer(h, cos, sin)\n            h = centre(m)\n" in text
    )
    assert "        with torch.no_grad():\n            self.running.copy_(" in text


def test_the_module_is_loaded_once_and_shows_its_source() -> None:
    text = text_of()
    loaded = load_program(text)
    assert load_program(text) is loaded
    with pytest.raises(AttributeError) as caught:
        loaded.Program.forward(None, None, None)
    assert "h = self.prologue(input_ids)" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(SyntaxError):
        load_program("def")


def test_a_program_that_nothing_uses_is_dropped() -> None:
    """Programs of calls that come once would fill the memory of a long run. Others are found by their name, as pickle looks."""
    text = "class Program:\n    def answer(self):\n        return 42\n"
    made = load_program(text).Program()
    name, path = made.__module__, load_program(text).__file__
    gc.collect()
    assert pickle.loads(pickle.dumps(made)).answer() == 42 and path in linecache.cache
    assert type(made) is load_program(text).Program
    sys.modules.pop(name)
    del made
    gc.collect()
    assert path not in linecache.cache
    with pytest.raises(ImportError):
        importlib.import_module(name)


@pytest.mark.parametrize("path", ["a.weight", "0.weight", "type", "original", "x-y.w", "weight", "float", "mesh"])
def test_attributes_of_parameters_hide_nothing(path: str) -> None:
    assert attribute_of(path) == ParameterSpec(path, (1,), "float32").attribute
    assert attribute_of(path).isidentifier() and not hasattr(torch.nn.Module, attribute_of(path))


def test_a_block_may_have_the_name_of_an_import() -> None:
    graph = gpt2_graph(2, 16, 4, 32, 8, 8)
    blocks = tuple(replace(block, name="BlockModule") if block.name == "GPT2Block" else block for block in graph.blocks)
    calls = tuple(replace(call, block="BlockModule") if call.block == "GPT2Block" else call for call in graph.calls)
    graph = replace(graph, blocks=blocks, calls=calls)
    text = program_text(graph, drawn_candidate(graph, mesh_of(dp=2), 0))
    assert "class ModelBlockModule(BlockModule):" in text and "nn.ModuleList(ModelBlockModule(mesh," in text


def call(block: str, inputs: str, outputs: str) -> Call:
    return Call(block, f"{block}.{outputs}", tuple(inputs.split()), tuple(outputs.split()), ())


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call("A", "x", "a"), call("A", "a", "b"), call("A", "b", "c")], [(0, 3)]),
        # an intermediate value is read later: the last two only
        ([call("A", "x", "a"), call("A", "a", "b"), call("A", "b", "c"), call("Z", "c a", "z")], [(0, 1), (1, 2), (3, 1)]),
        # another constant from the second on
        ([call("A", "x k", "a"), call("A", "a l", "b"), call("A", "b l", "c")], [(0, 1), (1, 2)]),
        # two values swap: one variable each cannot hold them
        ([call("A", "x y", "a b"), call("A", "b a", "c d"), call("A", "d c", "e f")], [(0, 3)]),
    ],
)
def test_loops(calls: list[Call], expected: list[tuple[int, int]]) -> None:
    assert [(loop.start, loop.repetitions) for loop in loops_of_calls(calls, calls[-1].outputs[:1])] == expected


def test_sizes_in_comments_and_where_the_batch_comes_from() -> None:
    assert shape_comment(("2*B", 16)) == "2B 16" and shape_comment(()) == "()"
    assert batch_size_source([("cos", (1, 16)), ("x", (16, "4*B"))]) == "x.shape[1] // 4"
    assert batch_size_source([("x", ("B/2",))]) == "x.shape[0] * 2"
    assert batch_size_source([("x", (3,))]) is None
    assert batch_size_source([("x", ("2*B + 3",))]) == "(x.shape[0] - 3) // 2"
    assert batch_size_source([("x", ("B/2 - 1",)), ("y", ("floor(B/2)", "B**2"))]) == "(x.shape[0] * 2 + 2)"
    assert batch_size_source([("x", ("B + 3",)), ("y", ("3*B",))]) == "y.shape[0] // 3"
