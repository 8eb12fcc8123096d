"""Odd words for every option of every command, derived from the parser; and odd files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from autopar.cli.parser import build_parser

TEXTS = (
    "", " ", "x", "²", "٣", "0", "-1", "1", "2", "1.5", "1e3", "nan", "inf", "-inf", "1e400", "9" * 12, "9" * 30, "9" * 5000,
    "0x10", "00",
    "=", ",", ":", "+", "a=b", "tp=", "=2", "tp=²", "tp=" + "9" * 30, "dp=2,dp=4", "dp=2,", "zero=-1", "schedule=x",
    "recompute=full", "micro=3",
    "pp=2", "pp=" + "9" * 9, "virtual=7", "zero_group=3", "nodes=0", "nodes=²", "nodes=1e300", "nodes=nan", "nodes=1.5",
    "memory=1e-9",
    "memory=1e300", "batch=0.5", "batch=1e18", "local:²", "local:0", "local:" + "9" * 30, "local:100000",
    "dgx-h100:" + "9" * 20, "dgx-h100+local",
    "+".join(["dgx-h100"] * 40), "x.yaml", "x.json", "x.py:f", "x.py:", ":f", ".py", "../..", "/", "/proc/nonesuch/x", "~", "--",
    "-", "-o", "\n", "a\nb",
    "\t", "\x00", "\x1b[31m", "\udcff", "é", "\u2028", "😀", "x" * 300, "x" * 5000, "a/" * 3000, "%s%n", "{}", "[bold]",
    "[/x]", "__class__",
    "float32", "float99", "bf16", "adamw", "sgd", "lion", "local", "global", "logits", "loss", "logits,logits",
)  # fmt: skip

FILES: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "zero bytes": b"\x00" * 100,
    "not utf-8": b"\xff\xfe{}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "a long number": b"9" * 6000,
    "an object": b"{}",
    "deep": b"[" * 100_000,
    "deep and whole": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deep objects in schema 2": b'{"schema_version": 2, "graph": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "a long number in it": b'{"schema_version": 2, "model_type": ' + b"9" * 6000 + b"}",
    "schema 1": b'{"schema_version": 1}',
    "schema 2": b'{"schema_version": 2}',
    "schema true": b'{"schema_version": true}',
    "a model type": b'{"model_type": "nonesuch"}',
    "a large model": b'{"model_type": "llama", "num_hidden_layers": 1000000000}',
    "a model of text": b'{"model_type": "gpt2", "n_embd": "x"}',
    "a nested model": b'{"model_type": "llama", "rope_scaling": [[[]]]}',
    "a model of nothing": b'{"model_type": "llama", "vocab_size": 0, "hidden_size": 0, "num_attention_heads": 0}',
    "an alias": b"a: &a [1]\nb: *a\n",
    "a tag": b"!!python/object/apply:os.system ['id']",
    "a date": b"size: 2001-99-99",
    "a merge": b"<<: 1",
    "keys": b"{[1]: 2}",
    "tabs": b"\ta: 1",
    "columns": b"id,source\n1,2\n",
    "a quote": b'"' * 100_000,
    "numbers": b"[1, -1]",
    "large shares": b"[1e308, 1e308, NaN]",
    "python": b"def f(:\n",
}

_TORCH = "import torch\n"
_MODULE = _TORCH + "class M(torch.nn.Module):\n "
_INIT = "def __init__(self):\n  super().__init__(); "
_LINEAR = _MODULE + _INIT + "self.a = torch.nn.Linear(2, 2)\n "
_MADE = "\ndef f(): return M(), (torch.ones(4, 2),)"

FACTORIES: dict[str, str] = {
    "syntax": "def f(:",
    "raises": "raise RuntimeError('no\\nway')",
    "exits": "import sys; sys.exit(3)",
    "raises in f": "def f(): raise KeyError('x')",
    "exits in f": "def f(): raise SystemExit('bye')",
    "none": "def f(): return None",
    "a number": "f = 3",
    "arguments": "def f(a, b): pass",
    "a generator": "def f(): yield 1",
    "odd error": "class E(Exception):\n def __str__(self): raise ValueError\ndef f(): raise E",
    "recursion": "def f(): return f()",
    "no example": _TORCH + "def f(): return torch.nn.Linear(2, 2)",
    "odd example": _TORCH + "def f(): return torch.nn.Linear(2, 2), 5",
    "odd keys": _TORCH + "def f(): return torch.nn.Linear(2, 2), {1: torch.ones(2, 2)}",
    "odd names": _TORCH + "def f(): return torch.nn.Linear(2, 2), {'no such': torch.ones(2, 2)}",
    "texts": _TORCH + "def f(): return torch.nn.Linear(2, 2), ('a',)",
    "no tensors": _TORCH + "def f(): return torch.nn.Linear(2, 2), ()",
    "empty": _TORCH + "def f(): return torch.nn.Linear(2, 2), {}",
    "no loss": _TORCH + "def f(): return torch.nn.Linear(2, 2), (torch.ones(2, 2),)",
    "scalar": _TORCH + "def f(): return torch.nn.Linear(2, 2), (torch.ones(()),)",
    "no batch": _TORCH + "def f(): return torch.nn.Linear(2, 2), (torch.ones(0, 2),)",
    "no forward": _TORCH + "def f(): return torch.nn.Module(), (torch.ones(2, 2),)",
    "odd forward": _MODULE + "def forward(self, x): raise IndexError('at\\nlast')" + _MADE,
    "no parameters": _MODULE + "def forward(self, x): return x.sum()" + _MADE,
    "complex": _MODULE + _INIT + "self.w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))\n "
    + "def forward(self, x): return (x * self.w).abs().sum()" + _MADE,
    "float8": _MODULE + _INIT + "self.w = torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)\n "
    + "def forward(self, x): return (x * self.w.float()).sum()" + _MADE,
    "odd result": _LINEAR + "def forward(self, x): return 'x'" + _MADE,
    "a vector": _LINEAR + "def forward(self, x): return self.a(x).sum(0)" + _MADE,
    "integers": _LINEAR + "def forward(self, x): return self.a(x).sum().long()" + _MADE,
}  # fmt: skip


def odd_files(folder: Path) -> dict[str, str]:
    """Paths that are no plan, table, cluster or configuration, by what they are; written into the folder."""
    out = {"a folder": str(folder), "nothing": str(folder / "none"), "below a file": str(folder / "empty" / "x")}
    out |= {"a device without an end": "/dev/zero", "an empty device": "/dev/null", "a full device": "/dev/full"}
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
        for ending in ("", ".json", ".yaml", ".csv"):
            (folder / f"{name}{ending}").write_bytes(content)
            out[f"{name}{ending}"] = str(folder / f"{name}{ending}")
    loop = folder / "loop.json"
    loop.symlink_to(loop)
    (folder / "closed.json").write_text("{}")
    (folder / "closed.json").chmod(0)
    (folder / "itself.yaml").write_text(json.dumps({"groups": [{"cluster": str(folder / "itself.yaml")}]}))
    return out | {name: str(folder / name) for name in ("loop.json", "closed.json", "itself.yaml")}


def odd_factories(folder: Path) -> dict[str, str]:
    """``file.py:f`` that give no model."""
    out = {"nothing": f"{folder / 'none.py'}:f", "a folder": f"{folder}:f"}
    for number, (name, text) in enumerate(FACTORIES.items()):
        (folder / f"factory{number}.py").write_text(text)
        out[name] = f"{folder / f'factory{number}.py'}:f"
    return out | {"no function": out["none"] + "g"}


def options_of(command: str) -> Iterator[argparse.Action]:
    """The options and positional arguments of a command that take a value."""
    actions = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr, index]
    for action in actions[command]._actions:  # type: ignore[index]
        if action.nargs != 0:
            yield action


def commands() -> tuple[str, ...]:
    return tuple(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]


def with_word(words: list[str], action: argparse.Action, positionals: dict[str, int], word: str) -> list[str]:
    """The command line with the argument's value replaced, or added."""
    if not action.option_strings:
        at = positionals[action.dest]
        return [*words[:at], word, *words[at + 1 :]] if at < len(words) else [*words, word]
    return [*words, f"{action.option_strings[-1]}={word}"]
