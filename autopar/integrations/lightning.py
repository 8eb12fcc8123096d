"""A strategy of Lightning for parallel models: fit, validate, test, predict; its checkpoints are those of the plain
LightningModule.

>>> from autopar.integrations.lightning import AutoparStrategy
>>> trainer = Trainer(strategy=AutoparStrategy(cluster="dgx-h100:8", example_inputs=batch), devices=1)

All processes are one device to it: loaders give the global batch on every rank, and what is logged is that of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from autopar.api import parallelize as make_parallel
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, StateError
from autopar.runtime.parallel import Parallel

T = TypeVar("T")


class AutoparStrategy(SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
    """A strategy whose model is parallel. `cluster` is that of `autopar.parallelize`, `parallelize` its further options
    (``{"force": "tp=4"}``). `module` names the part of the LightningModule that becomes the parallel model; by default the only
    one that has parameters. `example_inputs` are the arguments of one call of that part; by default the LightningModule's own
    ``example_input_array``."""

    strategy_name = "autopar"

    def __init__(
        self,
        *,
        cluster: str | Cluster,
        parallelize: Mapping[str, Any] | None = None,
        example_inputs: Any = None,
        module: str = "",
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self.cluster, self.options = cluster, dict(parallelize or {})
        self.example_inputs, self.module = example_inputs, module
        self.launcher_environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else None

    # -- one device

    @property
    def root_device(self) -> torch.device:
        if isinstance(self.accelerator, CUDAAccelerator):
            return torch.device("cuda", self.launcher_environment.local_rank() if self.launcher_environment else 0)
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return self.launcher_environment is None or self.launcher_environment.global_rank() == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        if not dist.is_initialized() and self.launcher_environment is not None:
            dist.init_process_group("nccl" if self.root_device.type == "cuda" else "gloo")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        values = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(values, src)
        return values[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return rank 0's decision: clocks of ranks differ."""
        return self.broadcast(decision)

    # -- the model

    @property
    def parallel(self) -> Parallel:
        """The parallel model inside the LightningModule."""
        part = dict(self._whole.named_modules()).get(self.module)
        if not isinstance(part, Parallel):
            raise AutoparError("the LightningModule has no parallel model yet: it is made when fit or validate begins")
        return part

    @property
    def _whole(self) -> LightningModule:
        assert self.lightning_module is not None, "the Trainer has connected it"
        return self.lightning_module

    def setup(self, trainer: Trainer) -> None:
        if type(self.precision_plugin) not in (Precision, DoublePrecision):
            raise AutoparError(
                f"precision={trainer.precision!r} is not for a parallel model: leave it out, and take parallelize="
                '{"precision": "bf16"}, which computes in bf16 over float32 weights'
            )
        whole = self._whole
        self.precision_plugin.convert_module(whole)
        self._make_parallel(whole)
        super().setup(trainer)

    def _make_parallel(self, whole: LightningModule) -> None:
        """Replace the part of the LightningModule."""
        self.module = self.module or _only_part(whole)
        parent, _, name = self.module.rpartition(".")
        part = whole.get_submodule(self.module)
        if isinstance(part, Parallel):
            return
        inside = {id(parameter) for parameter in part.parameters()}
        outside = [path for path, parameter in whole.named_parameters() if id(parameter) not in inside]
        if outside:
            raise AutoparError(
                f"{type(whole).__name__}.{outside[0]} is outside of {self.module}, the part that is parallel: put all parameters "
                'into one module, and name it with AutoparStrategy(module="...")'
            )
        example = self.example_inputs if self.example_inputs is not None else whole.example_input_array
        if example is None:
            raise AutoparError(
                f"a plan needs an example: pass AutoparStrategy(example_inputs=...), the arguments of one call of {self.module}"
            )
        inputs = (example,) if isinstance(example, torch.Tensor) else example
        parallel = make_parallel(part.train(), self.cluster, example_inputs=inputs, **self.options)
        setattr(whole.get_submodule(parent), name, parallel)

    def teardown(self) -> None:
        """A parallel model stays where it is."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "the Trainer has set it"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain LightningModule, with full tensors on every rank (all ranks must call)."""
        prefix, state = f"{self.module}.", dict(self._whole.state_dict())
        rest = {key: value for key, value in state.items() if not key.startswith(prefix)}
        return {prefix + key: value for key, value in self.parallel.full_state().items()} | rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        prefix, state = f"{self.module}.", dict(checkpoint["state_dict"])
        mine = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
        self.parallel.load_state_dict(mine, strict=strict)
        result = self._whole.load_state_dict(state, strict=False)
        missing = [key for key in result.missing_keys if not key.startswith(prefix)]
        if strict and (missing or result.unexpected_keys):
            what = f"misses {missing[0]}" if missing else f"has {result.unexpected_keys[0]}, which the module has not"
            raise StateError(f"the checkpoint {what}: resume from one of this LightningModule")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the plain module's optimizer, with full tensors on every rank (all ranks must call)."""
        return self.parallel.full_optimizer_state(_plain(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.parallel.load_full_optimizer_state(_plain(optimizer), state)


def _plain(optimizer: Any) -> Optimizer:
    inner: Optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return inner


def _only_part(whole: nn.Module) -> str:
    """The only child with parameters. AutoparError where there are several, or none."""
    parts = [name for name, child in whole.named_children() if next(child.parameters(), None) is not None]
    if len(parts) != 1:
        raise AutoparError(
            f"{type(whole).__name__} has {len(parts)} parts with parameters ({', '.join(parts)}), and one becomes the parallel "
            'model: put them into one module, and name it with AutoparStrategy(module="...")'
        )
    return parts[0]
