"""The graphs that inductor makes kernels of, after all of its passes, run as they are: no compiler of C++ is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx as inductor
from torch._inductor.virtualized import V


def run_and_get_graphs(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of a function, and the code of each graph that inductor would make kernels of meanwhile: what
    ``torch._inductor.utils.run_and_get_code`` gives, before kernels. Seen on 2.13.0: `_recursive_post_grad_passes`."""
    usual, codes = inductor.compile_fx, list[str]()

    def run_graph(graph: fx.GraphModule, examples: list[Any], **options: Any) -> Callable[..., Any]:
        inductor.view_to_reshape(graph)
        with V.set_fake_mode(inductor.fake_tensor_prop(graph, examples)):
            inductor._recursive_post_grad_passes(graph, is_inference=options.get("is_inference", False))
        graph.recompile()
        codes.append(graph.code)
        return make_boxed_func(graph)

    def compile_graphs(graph: fx.GraphModule, examples: list[Any], **options: Any) -> Any:
        if "inner_compile" not in options:  # else it is called by itself
            options |= {
                "inner_compile": run_graph,
                "config_patches": {**options.get("config_patches", {}), "fx_graph_cache": False},
            }
        return usual(graph, examples, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compile_fx", compile_graphs)
        return function(), codes
