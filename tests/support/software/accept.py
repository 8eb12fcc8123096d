"""Gives what was written to the software's own configuration class, and prints what it made of it as JSON. A process of its own,
with the folder of packages on its path: ``python accept.py SOFTWARE FILE ...``, several files in one process. Beside each lies
``FILE.case``: devices, and sizes of the model as Megatron names them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def case_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_name(f"{path.name}.case").read_text())
    return found


def torchtitan(path: Path) -> dict[str, Any]:
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(path.read_text().split())
    parallel = config.parallelism
    policy = type(config.activation_checkpoint).__qualname__.partition(".")[0] if config.activation_checkpoint else ""
    return {
        "tensor": parallel.tensor_parallel_degree,
        "stages": parallel.pipeline_parallel_degree,
        "context": parallel.context_parallel_degree,
        "shards": parallel.data_parallel_shard_degree,
        "replicas": parallel.data_parallel_replicate_degree,
        "batch": config.training.global_batch_size,
        "recompute": {"": "none", "SelectiveAC": "products", "FullAC": "full"}[policy],
    }


def megatron(path: Path) -> dict[str, Any]:
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    words = [line.removeprefix("--").partition(" ") for line in path.read_text().splitlines() if line.startswith("--")]
    given = {key.replace("-", "_"): (int(value) if value.isdigit() else value) if value else True for key, _, value in words}
    names = {"num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size"}
    given = {names.get(key, key): value for key, value in given.items()}
    known = ModelParallelConfig.__dataclass_fields__
    if given.get("pipeline_model_parallel_size", 1) > 1:
        given["pipeline_dtype"] = torch.bfloat16
    parallel = ModelParallelConfig(**{key: value for key, value in given.items() if key in known})
    inner = TransformerConfig.__dataclass_fields__
    sizes = case_of(path)["sizes"]
    if "recompute_modules" in given:
        given["recompute_modules"] = given["recompute_modules"].split()
    made = TransformerConfig(**sizes, **{key: value for key, value in given.items() if key in inner})
    return {
        "tensor": parallel.tensor_model_parallel_size,
        "stages": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "experts": parallel.expert_model_parallel_size,
        "recompute": {"full": "everything", "selective": "selective", None: "none"}[made.recompute_granularity],
        "batch": given["global_batch_size"],
    }


def deepspeed(path: Path) -> dict[str, Any]:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank = lambda *_: 0  # of 64, which are not there: without it the class takes itself to be alone

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return int(case_of(path)["devices"])

        def get_model_parallel_world_size(self) -> int:
            return 1

        get_sequence_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size

    os.environ["WORLD_SIZE"] = str(case_of(path)["devices"])
    found = DeepSpeedConfig(str(path), mpu=Ranks())
    offload = found.zero_config.offload_optimizer
    return {
        "zero": found.zero_optimization_stage,
        "micro": found.train_micro_batch_size_per_gpu,
        "batch": found.train_batch_size,
        "offload": bool(offload and getattr(offload.device, "value", offload.device) == "cpu"),
    }


def accelerate(path: Path) -> dict[str, Any]:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    found = load_config_from_file(str(path))
    out: dict[str, Any] = {"devices": found.num_processes, "tensor": 1, "context": 1, "zero": 0, "recompute": "none"}
    if found.fsdp_config:
        keys = {key.removeprefix("fsdp_"): value for key, value in found.fsdp_config.items()}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=keys["version"], reshard_after_forward=keys["reshard_after_forward"], cpu_offload=keys["offload_params"],
            auto_wrap_policy=keys["auto_wrap_policy"], activation_checkpointing=keys["activation_checkpointing"],
        )  # fmt: skip
        out |= {
            "zero": 3 if plugin.reshard_after_forward else 2,
            "recompute": "full" if plugin.activation_checkpointing else "none",
        }
    if found.parallelism_config:
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in found.parallelism_config.items()}
        mesh = ParallelismConfig(**sizes)
        assert mesh.total_size == found.num_processes
        out |= {"tensor": mesh.tp_size, "context": mesh.cp_size}
    return out


def transformers(path: Path) -> dict[str, Any]:
    from transformers import HfArgumentParser, TrainingArguments

    data = json.loads(path.read_text()) | {"use_cpu": True, "bf16": False, "fp16": False}
    (found,) = HfArgumentParser(TrainingArguments).parse_dict(data)
    config = found.fsdp_config or {}
    beside = path.with_name(path.name.replace("training_arguments", "distributed_config"))
    if beside.exists():
        from transformers.distributed import DistributedConfig

        placed = DistributedConfig(**json.loads(beside.read_text()))
        assert placed.tp_size * placed.dp_size == case_of(path)["devices"]
        return {
            "micro": found.per_device_train_batch_size,
            "steps": found.gradient_accumulation_steps,
            "tensor": placed.tp_size,
            "zero": 3 if placed.fsdp_size > 1 else 0,
        }
    return {
        "micro": found.per_device_train_batch_size,
        "steps": found.gradient_accumulation_steps,
        "recompute": "full" if config.get("activation_checkpointing") or found.gradient_checkpointing else "none",
        "zero": (3 if config.get("reshard_after_forward", True) else 2) if found.fsdp else 0,
    }


def answers(name: str, paths: list[str]) -> list[dict[str, Any]]:
    """What the software of that name makes of each file."""
    accept = {each.__name__: each for each in (torchtitan, megatron, deepspeed, accelerate, transformers)}[name]
    return [accept(Path(path)) for path in paths]


if __name__ == "__main__":
    print("accepted " + json.dumps(answers(sys.argv[1], sys.argv[2:])))
