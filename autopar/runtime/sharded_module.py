"""A module whose parameters are DTensors over a mesh, under the names of the plain model: state dicts, full states, clipping."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from .calls import Calls
from .checkpoint.entry import Checkpoints
from .checkpoint.held import HeldState, Optimizers, as_optimizers, held_by_parallel
from .checkpoint.loading import LoadedCheckpoint
from .checkpoint.saving import PendingSave
from .comm.agreement import gather
from .comm.heartbeat import Heartbeat
from .compat.dtensor import local_of, replicated
from .errors import StateError, StateMismatch
from .experts.placement import ExpertPlacement
from .module import Program
from .plain.assignments import Assignments
from .plain.module_tree import TreeNode
from .plain.optimizer_state import full_optimizer_state, load_full_optimizer_state
from .plain.plain_loading import EXTRA, converts_states, extra_state, extra_states, load_into_part, remedy_for
from .plain.plain_model import PlainModel
from .plain.sharded_state_dict import ShardedStateDict
from .pretrained.adapters import holds_adapters, is_adapted, read_adapters, save_adapters
from .pretrained.export import save_pretrained
from .pretrained.load import load_pretrained, saved_names
from .state.gradient import clip_gradients
from .state.model_state import State
from .state.offload_optimizer import offload_optimizer
from .state.stage_tensors import OnAnotherStage, for_holders, holders_of
from .state.weight_source import WeightSource
from .step.out_of_memory import MemoryGuard, WatchedWork
from .transfer.connection import Endpoint
from .transfer.transfer_plan import TransferPlan
from .transfer.weight_layout import layout_of_program
from .transfer.weight_transfer import BUFFER_BYTES, JOIN_SECONDS, WeightTransfer


class ShardedModule(TreeNode):
    """The weights of a parallel model as its user sees them. `plain`: the model that it was made from, where that is known."""

    program: Program
    state: State
    heartbeat: Heartbeat | None
    memory: MemoryGuard
    checkpoints: Checkpoints
    transfers: dict[Any, WeightTransfer]
    plain: PlainModel | None
    plan: Any
    """The plan (an `autopar.Plan`) that `parallelize` followed; None of an exported program."""
    calls: Calls
    _watch: WatchedWork
    assignments: Assignments
    _expert_placement: ExpertPlacement

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """DTensors over the data of the buffers, which go together with the parameters in one operation."""
        for buffer in super().buffers(recurse):
            yield buffer if isinstance(buffer, DTensor) else replicated(buffer, self.program.mesh.state_mesh)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """DTensors by name, for torch.distributed.checkpoint; pickling it warns, since a rank has only its shards."""
        self._expert_placement.refuse_state_dict()
        state = super().state_dict(*args, **kwargs)
        if args or kwargs.get("destination") is not None or self.program.mesh.whole_mesh.size() == 1:
            return state
        return ShardedStateDict(state, self._why_part_of_state(state))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.plain is not None and EXTRA in extra_states(self.plain.skeleton):
            destination[prefix + EXTRA] = extra_state(self.plain.skeleton)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.plain is not None and EXTRA in extra_states(self.plain.skeleton) and (key := prefix + EXTRA) in state_dict:
            self.plain.skeleton.set_extra_state(state_dict.pop(key))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _why_part_of_state(self, state: Mapping[str, Any]) -> str:
        """Return why a plain model cannot load it; "" where it can."""
        missing = [] if self.plain is None else self.plain.unfit_keys(state)[0]
        return f"has no {missing[0]}, which no program uses" if missing else ""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of `state_dict`, or the full state dict of the plain model; a part of it where not `strict`."""
        if assign:
            raise StateError(
                "load_state_dict(assign=True) puts other tensors in the place of the shards, which programs do not see: leave "
                "assign out, and the values are copied into them"
            )
        full = bool(state_dict) and not any(isinstance(each, DTensor) for each in state_dict.values())
        if self.plain is None or not full:
            self._expert_placement.refuse_state_dict()
            with self.loading("load_state_dict"):
                return super().load_state_dict(state_dict, strict)
        return self.load_plain_state(state_dict, strict)

    def load_plain_state(self, state: Mapping[str, Any], strict: bool, prefix: str = "") -> Any:
        """Load the full state dict of the plain model, or of its module whose names begin with `prefix`."""
        assert self.plain is not None
        if converts_states(self.plain.skeleton.get_submodule(prefix.removesuffix("."))):
            return self._load_converted(self.plain, state, strict, prefix)
        named = {prefix + key: value for key, value in state.items()}
        missing, unexpected = self.plain.unfit_keys(named, prefix)
        if strict and (missing or unexpected):
            odd = ([f"misses {_first_of(missing)}"] if missing else []) + ([f"has {_first_of(unexpected)}"] if unexpected else [])
            raise StateMismatch(
                f"the state dict {' and '.join(odd)}{', which the model has not' if unexpected else ''}: {remedy_for(unexpected)}"
            )
        self._load_full(named, "load_state_dict", part=not strict or bool(prefix))
        return _IncompatibleKeys(*([key.removeprefix(prefix) for key in keys] for keys in (missing, unexpected)))

    def _load_converted(self, plain: PlainModel, state: Mapping[str, Any], strict: bool, prefix: str) -> Any:
        """Load a state dict that the model's own code converts, which needs the values of now: what it gets is loaded."""
        names = {key: name for key, name in plain.names.items() if key.startswith(prefix) or name.startswith(prefix)}
        with self.loading("load_state_dict"):
            held = {name: each.clone() for name, each in plain.unused.items() if name in names.values()}
            for name in dict.fromkeys(names.values()):
                if name not in held:
                    held[name] = self.state.broadcast_full(name).to("cpu", copy=True)
            result, values = load_into_part(plain.skeleton, prefix.removesuffix("."), state, strict, held)
        self._load_full({key: values[name] for key, name in names.items()}, "load_state_dict", part=True)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse torch.save, pickle and copy.copy."""
        raise StateError(
            "a parallel model cannot be pickled, since a rank has only its part: torch.save(parallel.full_state(), path), with "
            "full_state called on every rank, or parallel.save(folder, optimizer, step=...); copy.deepcopy copies it"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:  # what DistributedDataParallel asks for first
        raise StateError(
            "a parallel model reduces its own gradients: do not wrap it in DistributedDataParallel; with accelerate, take "
            "autopar.integrations.accelerate.Accelerator"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for scripts that come from DDP. The gradients of several calls accumulate with and without it."""
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients, each element counted once under any plan; return the norm before clipping."""
        mesh = self.program.mesh
        gradients = [p.grad for p in self.state.every_parameter.values() if isinstance(p.grad, DTensor)]
        here = [each for each in gradients if not isinstance(each, OnAnotherStage)]
        first = [each for each in here if min(holders.stages if (holders := holders_of(each)) else (0,)) == mesh.pp.coordinate]
        with self._watch("clip_grad_norm_"):
            return clip_gradients(here, first, mesh, max_norm, norm_type)

    def load_full_state(self, source: WeightSource) -> None:
        """Copy a full state dict (or name -> full tensor) of the original model into the local shards."""
        self._load_full(source, "load_full_state")

    @contextlib.contextmanager
    def loading(self, doing: str) -> Iterator[None]:
        """A context around a load, or another exchange, which all ranks enter before one of them changes anything."""
        with self._watch(doing):
            gather(None)
            yield

    def _load_full(self, source: WeightSource, doing: str, part: bool = False) -> None:
        """Load full tensors; with `part` what a mapping lacks keeps its values."""
        with self.loading(doing):
            if self.plain is not None and isinstance(source, Mapping):
                self.plain.load_unused(source)
                specs = self.state.index.specs.items()
                empty = {name: torch.empty(spec.shape, device="meta") for name, spec in specs if spec.buffer}
                source = self.plain.canonical(source, empty | self.state.buffers)
            elif isinstance(source, Mapping):
                given = {name: source[key] for key, name in self.state.tied.items() if key in source}
                source = {**source, **given} if given else source
            self.state.load_full(source, source.keys() if part and isinstance(source, Mapping) else None)

    def full_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the original model, which loads it strictly: full tensors on every rank (all ranks must call)."""
        names = saved_names(self.state, None)
        with self._watch("full_state"):
            held = {name: self.state.broadcast_full(name) for name in dict.fromkeys(names.values())}
        return {key: held[name] for key, name in names.items()} if self.plain is None else self.plain.state_dict(held)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state dict of the plain model's optimizer, with full tensors on every rank (all ranks must call)."""
        with self.loading("full_optimizer_state"):
            return full_optimizer_state(self.state, optimizer, dict(self.named_parameters()))

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `full_optimizer_state` gave, under this or another plan, or the state dict of the plain model's optimizer
        (all ranks must call)."""
        with self.loading("load_full_optimizer_state"):
            load_full_optimizer_state(self.state, optimizer, state, dict(self.named_parameters()))
            self._expert_placement.know([optimizer], placed=True)

    def offload_optimizer(self, optimizer: torch.optim.Optimizer, device: str = "cpu") -> None:
        """Keep the optimizer's state in host memory (pinned on CUDA) between its steps. A step copies it to the device and back
        part by part, and computes what it did before, bit by bit. Call it once, right after making the optimizer."""
        offload_optimizer(optimizer, self.program.mesh.device, to=device)

    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizers = None,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> PendingSave:
        """Save a checkpoint as ``folder/step_00000100``: the model, the state of the optimizer (or of several), all random state
        and `extra` (of rank 0: numbers, text, tensors, lists and dictionaries, such as a scheduler's state dict). Any plan on any
        number of processes loads it. It is found once it is whole; then all but the `keep` newest are removed.

        With `asynchronous` it is written by a thread, from copies in host memory, while training goes on. The next save waits for
        it, and so do ``.wait()`` of what is returned and `shut_down`; they raise CheckpointProblem on all ranks where it could
        not be written, and then the one before is the newest. All ranks must call."""
        self.calls.check_steps_ended("save")
        with self._watch("saving a checkpoint"), self._expert_placement.in_model_order(as_optimizers(optimizer)):
            return self.checkpoints.save(
                self._held(), folder, optimizer, self.state.mesh.describe,
                step=step, extra=extra, keep=keep, asynchronous=asynchronous,
            )  # fmt: skip

    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizers = None,
        *,
        step: int | None = None,
    ) -> LoadedCheckpoint | None:
        """Load the newest whole checkpoint of the folder (or that of `step`), whichever plan saved it, into the model, the
        optimizer and the random state. Returns its step and `extra`; None where the folder has no checkpoint. One that is damaged
        is passed over with a warning. All ranks must call."""
        self.calls.check_steps_ended("load")
        with self._watch("loading a checkpoint"), self._expert_placement.in_model_order(as_optimizers(optimizer)):
            return self.checkpoints.load(self._held(), folder, optimizer, self.state.mesh.describe, step=step)

    def _held(self) -> HeldState:
        words = self.plan.describe() if self.plan is not None else "an exported program"
        words = f"{words} (program {self.calls.program_digest[:8]})"  # plans that differ may have the same words
        return held_by_parallel(self.state, self.plain, self.reseed, words)

    def save_pretrained(
        self, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB", *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the weights in Hugging Face's layout, under the names that it has there: ``model.safetensors``, or parts of at
        most `max_shard_size` with an index, and the configuration of a model that has one; `from_pretrained`, vLLM and
        ``safetensors.torch.load_model`` load the folder. Floating-point weights are written as they are trained, or in `dtype`.
        No rank ever holds more than one whole tensor. Of a PeftModel the adapters are written, as peft writes them. All ranks
        must call."""
        self.calls.check_steps_ended("save_pretrained")
        with self._watch("writing the weights"):
            rounds = self.checkpoints.rounds(self.state.mesh.describe)
            if self.plain is not None and is_adapted(self.plain.skeleton):
                return save_adapters(self.state, self.plain, rounds, folder)
            return save_pretrained(self.state, self.plain, rounds, folder, max_shard_size=max_shard_size, dtype=dtype)

    def load_pretrained(self, folder: str | os.PathLike[str], strict: bool = True) -> Any:
        """Load weights in that layout (a folder, or one safetensors file), of which each rank reads its own part. What does not
        fit is refused before anything changes; without `strict` weights may be missing, unexpected or of a longer floating-point
        type than the model's, and what is missing or unexpected is returned, as by `load_state_dict`. A PeftModel takes a folder
        of adapters too. All ranks must call."""
        self.calls.check_steps_ended("load_pretrained")
        if self.plain is not None and holds_adapters(folder, self.plain.skeleton):
            self._load_full(read_adapters(folder, self.plain.skeleton), "load_pretrained", part=True)
            return None
        with self._watch("loading weights"):
            rounds = self.checkpoints.rounds(self.state.mesh.describe)
            return load_pretrained(self.state, self.plain, rounds, folder, strict=strict)

    def send_weights(
        self,
        address: str,
        *,
        dtype: torch.dtype | None = None,
        memory_bytes: int = BUFFER_BYTES,
        join_seconds: float = JOIN_SECONDS,
    ) -> TransferPlan:
        """Send the weights to another job, whose ranks call `receive_weights` with the same address (``host:port`` of this job's
        first rank): each element once to each rank that has it, straight from a rank that holds it, in rounds with buffers of at
        most `memory_bytes` on each rank. Floating-point weights are sent as they are trained, or in `dtype`. Returns the plan of
        the transfer, with its bytes and lower bounds. All ranks must call; the jobs stay connected for the next call.

        TransferProblem, on all ranks of both jobs, names who is not there after `join_seconds`, or what does not fit."""
        self.calls.check_steps_ended("send_weights")
        return self._transfer(address, True, dtype, memory_bytes, join_seconds)

    def receive_weights(self, address: str, *, join_seconds: float = JOIN_SECONDS) -> TransferPlan:
        """Receive into these weights, in place, what the other job sends by `send_weights` at the address. All ranks must
        call."""
        return self._transfer(address, False, None, BUFFER_BYTES, join_seconds)

    def _transfer(
        self, address: str, sends: bool, dtype: torch.dtype | None, memory_bytes: int, join_seconds: float
    ) -> TransferPlan:
        state, options = self.state, {"dtype": dtype, "memory_bytes": memory_bytes} if sends else {}
        key = address, sends
        with self._watch("sending weights" if sends else "receiving weights"), self._expert_placement.in_model_order():
            if key in self.transfers and self.transfers[key].connection is not None:
                self.transfers[key].check_options(options)
            else:
                rounds = self.checkpoints.rounds(state.mesh.describe)
                end = Endpoint(address, sends, rounds.rank, rounds.size, join_seconds)
                layout = layout_of_program(state.mesh, state.index, state.zero_dims, dtype)
                self.transfers[key] = WeightTransfer(end, lambda source: layout, memory_bytes, rounds, options)
            parameters = {name: local_of(each) for name, each in state.parameters.items()}
            return self.transfers[key].run(parameters | state.buffers)

    def reseed(self, seed: int) -> None:
        """Restart all random streams from `seed`; pass the same on every rank."""
        programs = self.calls.variants.programs.values() if self.calls.variants is not None else ()
        for program in (self.program, *(variant.program for variant in programs)):
            program.mesh.reseed(seed)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by original name with full tensors, on every rank (all ranks must call)."""
        every = {name: parameter for name, parameter in self.named_parameters() if parameter.grad is not None}
        # a script may have set one that another stage holds
        given = {name: for_holders(each, each.grad) for name, each in every.items() if isinstance(each, DTensor)}
        own = {name: given[name] for name in self.state.parameters.keys() & given.keys()}
        unused = {name: each.grad.full_tensor() for name, each in self.state.unused.items() if isinstance(each.grad, DTensor)}
        with self._watch("full_gradients"):
            return {n: self.state.broadcast_full(n, own.get(n)) for n in self.state.names_on_any_stage(own)} | unused


def _first_of(keys: list[str]) -> str:
    return keys[0] + (f" ({len(keys) - 1} more)" if len(keys) > 1 else "")
