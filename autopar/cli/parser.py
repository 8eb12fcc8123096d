"""Arguments of the command line. Imports nothing heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from autopar.cli.output import say

MODEL_HELP = "a bundled name (see `autopar models`), a Hugging Face config.json, or file.py:factory"
CLUSTER_HELP = "preset:nodes (see `autopar clusters`), local:processes, or a YAML file"


class Parser(argparse.ArgumentParser):
    """Prints one line for a wrong argument, and exits with status 2."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if value == []:  # argparse, of ``--rank=--``
                self.error(f"{name} has no value")
        return found, rest

    def error(self, message: str) -> NoReturn:
        line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
        say(f"autopar: error: {line}; see `{self.prog} --help`")
        sys.exit(2)


MOST = 2**31 - 1
"""The longest number on the command line."""


_MOST_PROCESSES = 4
"""Processes of a search by default: few problems of it do not wait for each other."""


def _usable_processes() -> int:
    """One per core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_PROCESSES)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    whole = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
    if not whole or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 to {MOST}")
    return int(text)


def from_zero(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def level_sizes(text: str) -> tuple[int, ...]:
    """``8,64``: whole numbers that grow."""
    sizes = tuple(positive(each) for each in text.split(","))
    if list(sizes) != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: write the smaller levels first, as 8,64")
    return sizes


def _number(text: str) -> float:
    """A number; none of what is refused where the text is none."""
    try:
        return float(text) if text.isascii() else -1.0
    except ValueError:
        return -1.0


def seconds(text: str) -> float:
    """Seconds above 0."""
    if not 0 < (value := _number(text)) <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")
    return value


def amount(text: str) -> float:
    """A number above 0, as 1e12."""
    if not 0 < (value := _number(text)) <= 1e18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0, as 1e12")
    return value


def share(text: str) -> float:
    """A share, from 0 to below 1."""
    if not 0 <= (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share from 0 to below 1")
    return value


def batch_dims(text: str) -> int | dict[str, int]:
    """``1``: where all inputs have the batch; or ``src=1,mask=0``, by argument."""
    parts = [each.rpartition("=") for each in text.split(",")]
    if not all(dim.isascii() and dim.isdigit() and len(dim) <= 2 for _, _, dim in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no dimension: write 1, or src=1,mask=0 by argument of the forward")
    if len(parts) == 1 and not parts[0][1]:
        return int(parts[0][2])
    if not all(name.isidentifier() for name, _, _ in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} names no arguments of the forward: write src=1,mask=0")
    return {name: int(dim) for name, _, dim in parts}


def _lazy(module: str) -> Callable[[argparse.Namespace, Any], int]:
    """The command's `run`, imported when it is called."""

    def run(arguments: argparse.Namespace, console: Any) -> int:
        return int(import_module(f"autopar.cli.commands.{module}").run(arguments, console))

    return run


def _inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--batch", type=positive, metavar="N", help="global batch: sequences or samples of one step")
    parser.add_argument("--seq", type=positive, metavar="S", help="tokens of a sequence, for models that take tokens")
    said = "where inputs have the batch, all of them or by argument (default: dimension 0, or found)"
    parser.add_argument("--batch-dim", type=batch_dims, metavar="1", help=said)


def words(text: str) -> tuple[str, ...]:
    """A script and its arguments, as a shell reads them."""
    try:
        out = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {error}") from None
    if not out:
        raise argparse.ArgumentTypeError("name a script, as train.py")
    return out


def constraint(text: str) -> tuple[str, dict[str, str]]:
    """``lm_head:tp=R``: a name, and its placement by mesh axis."""
    from autopar.errors import AutoparError
    from autopar.solve.problem.pins import parse_constraint

    try:
        return parse_constraint(text)
    except AutoparError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _planning(parser: argparse.ArgumentParser) -> None:
    _inputs(parser)
    dtypes = "float32 (default), bf16 or fp16 (compute over float32 masters), fp8 (bf16 with linear layers in float8, by torchao)"
    parser.add_argument("--dtype", default=None, help=f"{dtypes} or float64")
    degrees = (
        "fix degrees: dp, tp, tp2, ep, pp, virtual, schedule (1f1b, interleaved, zbv, ...), zero, zero_group (0: all data "
        "ranks), micro (micro-batch size per data rank);"
    )
    fixed = (
        "or a fixed configuration without search: all of tp, pp, zero, micro_batches, recompute, zero_group, sequence_parallel"
    )
    parser.add_argument("--force", default="", metavar="tp=4,zero=3", help=f"{degrees} {fixed}")
    pinned = "pin the placement of a parameter, of a module's result or of a source line (net.py:12); may be repeated"
    parser.add_argument("--constrain", type=constraint, action="append", metavar="'layers.*.up.weight:tp=S(0)'", help=pinned)
    parser.add_argument(
        "--memory-margin", type=share, metavar="0.1", help="share of each device's memory that the plan leaves free"
    )
    parser.add_argument("--strict", action="store_true", help="an operation without a sharding rule is an error")
    parser.add_argument(
        "--no-cache", action="store_true", help="search without reading or writing the cache, ~/.cache/autopar/plans"
    )
    parser.add_argument("--time-limit", type=seconds, default=300.0, metavar="SECONDS", help="of the search (default 300)")
    help_ = f"of the search (default: one per core, at most {_MOST_PROCESSES})"
    parser.add_argument("--processes", type=positive, default=_usable_processes(), metavar="N", help=help_)


def _other_software(add: Callable[[str, str, str], argparse.ArgumentParser], plan: argparse.ArgumentParser) -> None:
    """``plan --for``, ``fit`` and ``compare-clusters``."""
    plan.add_argument(
        "--for", dest="software", default="autopar", metavar="SOFTWARE",
        help="autopar (default), megatron, torchtitan, deepspeed, accelerate or transformers: what it should be set to",
    )  # fmt: skip
    fit = add("fit", "software.fit", "whether configurations of other software start and fit, and what is better")
    fit.add_argument("config", metavar="CONFIG", nargs="+", help="shell script of arguments, overrides, TOML, YAML or JSON")
    fit.add_argument("--model", metavar="MODEL", help=f"where the file does not say it: {MODEL_HELP}")
    fit.add_argument("--cluster", metavar="C", help=CLUSTER_HELP)
    fit.add_argument("--for", dest="software", default="", metavar="SOFTWARE", help="whose file it is, where that cannot be told")
    fit.add_argument("--batch", type=positive, metavar="N", help="global batch, where the file does not say it")
    fit.add_argument("--micro", type=positive, metavar="N", help="sequences of a micro-batch, where the file does not say it")
    fit.add_argument("--seq", type=positive, metavar="S", help="tokens of a sequence, where the file does not say it")
    fit.add_argument("--recompute", choices=("none", "selective", "full"), help="recomputation, where the script decides it")
    fit.add_argument("--quick", action="store_true", help="look for nothing better")
    which = add("compare-clusters", "software.compare_clusters", "time and money of a training run on several clusters")
    which.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    which.add_argument("clusters", metavar="CLUSTER@PRICE", nargs="+", help="as dgx-h100:16@2.5: price of a device for an hour")
    which.add_argument("--tokens", type=amount, required=True, metavar="T", help="of the run, as 1e12")
    which.add_argument("--batch", type=positive, required=True, metavar="N", help="global batch: sequences of one step")
    which.add_argument("--seq", type=positive, metavar="S", help="tokens of a sequence")
    which.add_argument("--dtype", default="bf16", help="bf16 (default), fp16, fp32 or fp8")
    which.add_argument("--for", dest="software", default="", metavar="SOFTWARE,...", help="only with these (default: all)")


def build_parser() -> argparse.ArgumentParser:
    """The parser. ``arguments.run(arguments, console)`` runs the command."""
    parser = Parser(prog="autopar", description="Automatic parallelization of PyTorch models: plan, rewrite, run.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")

    def add(name: str, module: str, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("--json", action="store_true", help="one JSON document on stdout; progress goes to stderr")
        command.set_defaults(run=_lazy(module))
        return command

    def of_plan(name: str, module: str, help: str) -> argparse.ArgumentParser:
        command = add(name, module, help)
        command.add_argument("plan", metavar="plan.json")
        return command

    plan = add("plan", "plan", "search for the best plan and write it down")
    _planning(plan)
    plan.add_argument("--reduce-dtype", metavar="bf16", help="in which gradients are summed over data ranks (default: masters')")
    plan.add_argument("--cluster", required=True, metavar="C", help=CLUSTER_HELP)
    plan.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, ...: how much state each parameter has")
    plan.add_argument(
        "--expert-load", default="1.0", metavar="1.3",
        help="load of the busiest expert-parallel rank over the mean, or a JSON list of tokens per expert (default 1.0)",
    )  # fmt: skip
    plan.add_argument(
        "--lengths", metavar="512",
        help="documents of packed sequences: a length of all, or a JSON list of lengths or histogram (default: one a sequence)",
    )  # fmt: skip
    plan.add_argument(
        "--beside", action="append", metavar="plan.json",
        help="a plan of another model on the same devices, whose memory is left to it (several times: of several)",
    )  # fmt: skip
    plan.add_argument("--mode", default="training", help="training (default), or inference: forwards without gradients")
    plan.add_argument("--new-tokens", type=int, default=0, metavar="N", help="of inference: decoded after each prompt of --seq")
    plan.add_argument("--objective", default="latency", help="of inference: latency (default), or throughput: --batch and above")
    plan.add_argument("--batch-norm", default="global", help="global (default), or local: by each data rank")
    compiled = "priced as torch.compile makes it, or not (default: on GPUs)"
    plan.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    plan.add_argument("--outputs", default="", metavar="logits,...", help="fields of the model's result beside the loss")
    plan.add_argument("-o", "--output", metavar="plan.json", help="where to write the plan (with --for: the folder of the files)")
    _other_software(add, plan)

    inspect = of_plan("inspect", "inspect", "show what a plan chose, at each level")
    views = inspect.add_mutually_exclusive_group()
    for view, text in (
        ("ops", "placements of every operation"),
        ("memory", "peak memory per device by kind"),
        ("comm", "collectives of one step"),
        ("timeline", "the pipeline schedule with the predicted times"),
        ("program", "the generated program"),
    ):
        views.add_argument(f"--{view}", dest="view", action="store_const", const=view, help=text)

    explain = of_plan(
        "explain", "explain", "why this plan: its bottlenecks, its costliest operations, and what alternatives would cost"
    )
    changed = "plan again with fixed degrees, or with nodes=16, memory=160 (GiB) or batch=64, and show the difference"
    explain.add_argument("--what-if", metavar="tp=8", help=changed)
    explain.add_argument("--formulas", action="store_true", help="the formulas of what costs most, with their numbers")
    explain.add_argument("--time-limit", type=seconds, default=300.0, metavar="SECONDS", help="of the new search (default 300)")

    report = of_plan("report", "report", "write a page of the plan to look at: one HTML file that needs no network")
    report.add_argument("-o", "--output", default="report.html", metavar="report.html", help="where (default report.html)")
    report.add_argument(
        "--measured", default="", metavar="measured.json",
        help="what parallel.report().save(...) wrote, to stand beside (default: measured.json beside the plan, if there)",
    )  # fmt: skip
    report.add_argument(
        "--what-if", action="append", metavar="memory=160",
        help="plan again with another memory (GiB), nodes, batch or degree, and show what that would take; may be repeated",
    )  # fmt: skip
    report.add_argument("--time-limit", type=seconds, default=300.0, metavar="SECONDS", help="of a new search (default 300)")
    trace = of_plan("trace", "report", "write the simulated step for Perfetto or chrome://tracing")
    trace.add_argument("-o", "--output", default="trace.json", metavar="trace.json", help="where (default trace.json)")
    trace.add_argument(
        "--measured", default="", metavar="measured_trace.json",
        help="what parallel.report().save_trace(...) wrote, into the same file",
    )  # fmt: skip

    verify = add(
        "verify",
        "verify",
        "run the plan on local processes and the model on one, and compare losses, outputs, gradients and an optimizer step",
    )
    _planning(verify)
    verify.add_argument("--cluster", default="local:4", metavar="local:N", help="processes on this machine (default local:4)")
    verify.add_argument("--outputs", default="", metavar="logits,...", help="fields of the model's result beside the loss")
    verify.add_argument("--plan", metavar="plan.json", help="verify this plan instead of searching for one")

    check = add("check", "check", "prove, without running it, that a program computes what its model does")
    check.add_argument("what", metavar="FOLDER|plan.json", help="the folder of an export, or a plan, whose program is written")
    check.add_argument("-o", "--output", default="", metavar="certificate.json", help="write claims, lemmas and assumptions")

    by_hand = add("check-module", "check", "find the wrong line of a module that was parallelised by hand")
    by_hand.add_argument("factory", metavar="file.py:factory", help="returns (module, inputs), or these and {'placements': ...}")
    by_hand.add_argument("--mesh", required=True, metavar="dp=2,tp=2", help="axes and ranks, outermost first; dp is that of data")

    doctor = add("doctor", "doctor", "list what is refused, replicated, fixed or slow in a model, before any plan")
    _inputs(doctor)
    doctor.add_argument("--data", metavar="file.py:loader", help="a function that returns batches, whose lengths are counted")
    doctor.add_argument("-o", "--output", metavar="lengths.json", help="where to write them, for `autopar plan --lengths`")
    doctor.add_argument("--dtype", default="bf16", help="bf16 (default), float32 or float64: the compute dtype")

    dryrun = of_plan(
        "dryrun", "dryrun", "run one rank of the plan on fake tensors: peak memory and collectives, without the cluster"
    )
    dryrun.add_argument("--rank", type=from_zero, default=0, metavar="R", help="which rank of the cluster (default 0)")

    dryrun.add_argument(
        "--measure",
        action="store_true",
        help="on real tensors and the device at hand, while collectives move nothing: computing time and peak memory",
    )

    compare = of_plan(
        "compare", "report", "a measured step beside the predicted one: per stage, block and collective, and what is off"
    )
    compare.add_argument(
        "measured", metavar="measured.json", nargs="?",
        help="what parallel.report().save(...) wrote (default: measured.json beside the plan)",
    )  # fmt: skip

    validate = add("validate", "validate", "price published training runs with the cost models, and summarise the errors")
    validate.add_argument("file", metavar="FILE.csv", nargs="?", help="a table of measurements (default: the bundled one)")
    validate.add_argument(
        "--leave-one-source-out",
        action="store_true",
        help="price each source with constants fitted without it, beside those of its software (takes minutes)",
    )

    export = of_plan("export", "export", "write the program as a folder that needs nothing but torch")
    export.add_argument("folder", metavar="DIR")
    export.add_argument("--overwrite", action="store_true", help="replace the files of an earlier export in DIR, and only those")
    export.add_argument("--trust", action="store_true", help="run the file.py:factory that the plan names, for initial weights")

    launch = of_plan("launch", "launch", "write the files with which a scheduler starts a program on a plan's cluster")
    schedulers = "slurm, kubernetes, kubeflow (PyTorchJob and TrainJob) or skypilot"
    launch.add_argument("--for", dest="scheduler", required=True, metavar="SCHEDULER", help=schedulers)
    launch.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to write them")
    script = "what torchrun runs, with its arguments (default train.py)"
    launch.add_argument("--script", type=words, default=("train.py",), metavar="'train.py --lr 3e-4'", help=script)
    launch.add_argument("--name", default="", metavar="NAME", help="of the job (default: that of the model)")
    launch.add_argument("--image", default="", metavar="IMAGE", help="of the containers, which has torch, autopar and the script")
    launch.add_argument(
        "--devices-per-node", type=positive, default=0, metavar="N", help="where the plan's cluster does not say it"
    )

    calibrate = add("calibrate", "calibrate", "measure this machine's devices and links, in under a minute")
    where = "where to write the cluster (default: it becomes what local:N means on this machine)"
    calibrate.add_argument("-o", "--output", metavar="cluster.yaml", help=where)
    calibrate.add_argument("--processes", type=positive, metavar="N", help="ranks at once (default: the GPUs, else up to 4)")
    calibrate.add_argument(
        "--levels",
        type=level_sizes,
        default=(),
        metavar="8,64",
        help="under torchrun: devices that each level of links joins (default: a node)",
    )
    whole = "verify and measure models too, beside what our constants predict, and write all of it (a GPU: 8 minutes)"
    calibrate.add_argument("--report", metavar="report.json", help=whole)
    calibrate.add_argument("--minutes", type=amount, default=8.0, metavar="8", help="with --report: no model begins after these")

    tune = add("tune", "tune", "under torchrun: run the plan and those nearest to it in turn, and keep the fastest")
    _planning(tune)
    tune.add_argument("--cluster", required=True, metavar="C", help=CLUSTER_HELP)
    tune.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, momentum, adagrad, rmsprop or muon")
    tune.add_argument("--candidates", type=positive, default=3, metavar="N", help="plans that run (default 3)")
    tune.add_argument("--laps", type=positive, default=2, metavar="N", help="turns of each plan (default 2)")
    tune.add_argument("--steps", type=positive, default=5, metavar="N", help="counted steps of a turn (default 5)")
    tune.add_argument("-o", "--output", required=True, metavar="plan.json", help="where to write the fastest plan")

    add("models", "listing", "bundled models")
    add("clusters", "listing", "bundled clusters")
    return parser
