"""A process that has imported what ranks need, and forks them: a rank then starts in milliseconds, not in seconds of imports.

It is single-threaded, imports only, and never joins a process group itself, so that a fork is as good as a fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[3]
MODULES = (
    "functorch.compile", "hypothesis", "pytest", "sympy", "sympy.combinatorics", "sympy.tensor.tensor", "torch._dynamo",
    "torch._export.non_strict_utils", "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass", "torch._functorch._aot_autograd.subclass_parametrization",
    "torch._inductor.compile_fx", "torch._inductor.fx_passes.dedupe_symint_uses", "torch._inductor.sizevars",
    "torch._subclasses.schema_check_mode", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.distributed.tensor.experimental", "torch.export._trace", "torch.fx.experimental.validator",
    "torch.profiler", "autopar.api", "autopar.capture", "autopar.cli.commands.dryrun",
    "autopar.cli.commands.explain", "autopar.cli.commands.export", "autopar.cli.commands.inspect", "autopar.cli.commands.plan",
    "autopar.cli.commands.verify", "autopar.cost_models.calibrate.local_cluster", "autopar.dryrun.run", "autopar.explain",
    "autopar.planning", "autopar.program.build", "autopar.program.export", "autopar.runtime.collectives",
    "autopar.runtime.parallel", "autopar.runtime.ops.experts", "autopar.solve.search", "autopar.software",
    "support.capture_cache", "support.harness.launch", "support.harness.rank_pool", "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""Imported before the forks: torch, ours and what tests use. A rank that makes a model of transformers would import for 2 s, one
that compiles, by any backend, for 1.4 s; most sets of ranks have such ranks."""
_REQUEST_BYTES = 1 << 16


class ForkServer:
    """The process that is forked. It starts at once and is waited for at the first fork."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", "from support.harness.fork_server import main; main()", str(its.fileno())],
            pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, env=environment, cwd=ROOT,
        )  # fmt: skip
        its.close()
        self.socket, self.lock = mine, threading.Lock()

    def ask(self, request: tuple[Any, ...], handles: tuple[int, ...] = ()) -> Any:
        """Its answer to one request."""
        with self.lock:
            socket.send_fds(self.socket, [pickle.dumps(request)], handles)
            answer = self.socket.recv(_REQUEST_BYTES)
        if not answer:
            raise RuntimeError(f"the process that forks ranks ended with status {self.process.wait()}")
        return pickle.loads(answer)

    def fork(self, function: str, *args: Any, environment: dict[str, str]) -> Fork:
        """A process that runs ``module:function``, with pipes on its stdin and stdout."""
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        pid = self.ask(("fork", function, args, environment), (its_input, its_output))
        for handle in (its_input, its_output):
            os.close(handle)
        return Fork(self, pid, os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb"))

    def close(self) -> None:
        """Ends it, and what it forked."""
        self.socket.close()
        self.process.wait()


class Fork:
    """A forked process, in the words of `subprocess.Popen`."""

    def __init__(self, template: ForkServer, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.template, self.pid, self.stdin, self.stdout = template, pid, stdin, stdout

    def poll(self) -> int | None:
        """Its status; None while it runs."""
        return self.template.ask(("status", self.pid))  # type: ignore[no-any-return]

    def wait(self) -> int:
        """Its status when it has ended."""
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """Ends it, and closes its pipes."""
        self.template.ask(("kill", self.pid))
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def main() -> None:
    """The loop of the template."""
    inlet = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    from autopar.cost_models.hardware.stack_entries import software_stacks
    from autopar.runtime.compat.torch_operations import new_results

    for find in (new_results, software_stacks):  # each rank would ask torch and the file itself: 0.1 s
        find()
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    ended: dict[int, int | None] = {}
    while True:
        message, handles, *_ = socket.recv_fds(inlet, _REQUEST_BYTES, 2)
        if not message:  # who asked is gone
            break
        kind, subject, *rest = pickle.loads(message)
        if kind == "fork":
            subject = os.fork()
            if not subject:
                inlet.close()
                _become(*pickle.loads(message)[1:], *handles)
            ended[subject] = None
            for handle in handles:
                os.close(handle)
        elif ended[subject] is None:
            if kind == "kill":
                os.kill(subject, signal.SIGKILL)
            pid, status = os.waitpid(subject, 0 if kind == "kill" else os.WNOHANG)
            ended[subject] = os.waitstatus_to_exitcode(status) if pid else None
        inlet.sendall(pickle.dumps(subject if kind == "fork" else ended[subject]))
    for pid in (pid for pid, status in ended.items() if status is None):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _become(function: str, args: tuple[Any, ...], environment: dict[str, str], stdin: int, stdout: int) -> None:
    """In the fork: runs the function, and ends."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    os.environ.update(environment)
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(*args)
        os._exit(0)
    except SystemExit as end:  # as Python itself ends
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)
