"""Text generation with a parallel model.

A model of Hugging Face transformers generates by the library's own `generate`, of which only the forward is replaced: it calls
the parallel model, without a key-value cache. Inputs are padded on the right to a multiple of `LENGTH_STEP`, so that few lengths
occur (each length has a program of its own); of a causal model this changes no logit before the padding. A model with a
`generate` of its own class runs that, with the parallel model in place of itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import RuntimeProblem

LENGTH_STEP = 64
"""Inputs are padded to multiples of it."""

_LIBRARY = "transformers"
_TAKEN = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache", "return_dict")


def generate(parallel: Any, *args: Any, **kwargs: Any) -> Any:
    """What the `generate` of the plain model of this `Parallel` returns in evaluation, on every rank. RuntimeProblem for a model
    without one.

    All ranks call it with the same arguments. Samples are drawn with rank 0's random state, on all ranks alike.
    """
    kind = type(parallel.plain.skeleton) if parallel.plain is not None else nn.Module
    owner = next((each for each in kind.__mro__ if "generate" in each.__dict__), None)
    own = inspect.getattr_static(kind, "generate", None)
    if owner is None or not isinstance(own, FunctionType):
        raise RuntimeProblem(
            f"{kind.__name__} has no method generate: call the parallel model in your own loop, or load parallel.full_state() "
            "into a plain model"
        )
    method: Callable[..., Any] = own
    with in_evaluation(parallel), torch.no_grad(), same_random_numbers(parallel.program.mesh.device):
        if owner.__module__.split(".")[0] == _LIBRARY:
            return method(_generator(parallel, kind), *args, **{**kwargs, "use_cache": False})
        return method(parallel, *args, **kwargs)


@contextlib.contextmanager
def in_evaluation(parallel: nn.Module) -> Iterator[None]:
    """The parallel model in eval mode; afterwards every module is in its own mode again."""
    before = [(module, module.training) for module in parallel.modules()]
    parallel.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Rank 0's state of the global random generator, on all ranks. Ranks that had it before go on as rank 0 does; the others have
    their own state again afterwards."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        yield
        return
    library: Any = torch if device.type == "cpu" else getattr(torch, device.type)
    own = library.get_rng_state()
    first = own.to(device, copy=True)
    dist.broadcast(first, 0)
    first = first.cpu()
    different = not torch.equal(own, first)
    if different:
        library.set_rng_state(first)
    try:
        yield
    finally:
        if different:
            library.set_rng_state(own)


def _generator(parallel: Any, kind: type[nn.Module]) -> Any:
    """A model of the library's class without weights, whose forward is the parallel model's."""
    assert parallel.plain is not None
    skeleton = parallel.plain.skeleton
    parameters = inspect.signature(kind.forward).parameters
    config: Any = skeleton.config
    if config.is_encoder_decoder or not {"input_ids", "attention_mask"} <= set(parameters):
        raise RuntimeProblem(
            f"{kind.__name__} is not a decoder of token ids with an attention mask, of which alone a parallel model generates: "
            "load parallel.full_state() into a plain model"
        )
    made: Any = kind.__new__(type(kind.__name__, (_Generator, kind), {"forward": _signed(kind)}))
    made.__dict__.update(skeleton.__dict__)
    made.__dict__["_parallel"], made.__dict__["_takes_positions"] = parallel, "position_ids" in parameters
    made.training = False
    return made


def _signed(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward, with the signature of the plain model's, which the library reads."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(kind.forward).bind(self, *args, **kwargs).arguments
        named = {key: value for key, value in given.items() if key not in ("self", "kwargs")} | given.get("kwargs", {})
        return _forward(self.__dict__["_parallel"], self.__dict__["_takes_positions"], self.config, named)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


class _Generator(nn.Module):
    """What the plain model says of its parameters, said of the parallel model's."""

    @property
    def device(self) -> torch.device:
        return self.__dict__["_parallel"].program.mesh.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        parameters: list[torch.Tensor] = self.__dict__["_parallel"].parameters()
        return next(p.dtype for p in parameters if p.is_floating_point())


def _forward(parallel: Any, takes_positions: bool, config: Any, given: Mapping[str, Any]) -> Any:
    """The logits of the tokens, of which the library takes the last ones."""
    refused = sorted(name for name, value in given.items() if name not in _TAKEN and value is not None and value is not False)
    if refused:
        raise RuntimeProblem(
            f"generation with {refused[0]} is not there on a parallel model: load full_state() into a plain model"
        )
    ids, keep = given["input_ids"], given.get("logits_to_keep") or 0
    length = ids.shape[1]
    mask = given.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    batch = {"input_ids": ids, "attention_mask": mask}
    if takes_positions:
        positions = given.get("position_ids")
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0) if positions is None else positions.expand(ids.shape)
    wanted = padded_length(length, getattr(config.get_text_config(), "max_position_embeddings", None))
    padded = {name: nn.functional.pad(tensor, (0, wanted - length)) for name, tensor in batch.items()}
    logits = parallel(**padded, use_cache=False).logits[:, :length]
    logits = logits[:, -keep:].contiguous() if isinstance(keep, int) else logits[:, keep].contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        dist.broadcast(logits, 0)  # replicas may differ in the last bit, and must not choose different tokens
    return SimpleLogits(logits=logits)


class SimpleLogits(SimpleNamespace):
    """The result of the forward; it is asked for caches by name."""

    logits: torch.Tensor

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)


def padded_length(length: int, most: int | None) -> int:
    """The length to which an input is padded, at most that of the model. RuntimeProblem where it is longer."""
    if most is not None and length > most:
        raise RuntimeProblem(f"{length} tokens, and the model has positions for {most}: generate fewer, or crop the prompt")
    up = -(-length // LENGTH_STEP) * LENGTH_STEP
    return up if most is None else min(up, most)
