"""Imports run one way, everything is listed, nothing happens at import time. Read from the source, not by importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.sources import syntax_nodes, syntax_tree

ROOT = Path(__file__).parents[2]
ORDER = [
    *("runtime", "errors", "files", "model_configs", "ir", "checker", "operations", "schedules", "ops", "capture", "rules"),
    *("cost_models", "solve", "explain", "report", "decoders", "software", "precision", "options"),
    *("plan_inputs", "planning", "passes"),
    *("program", "variants", "dryrun", "weight_transfer", "given_plan", "joint_plan", "several_models", "api", "tune"),
    *("integrations", "verification", "doctor", "machine_report", "validate", "launch", "cli"),
]
FOLDERS = {"passes": ROOT / "passes", "cost_models": ROOT / "cost_models"}
STANDARD = set(sys.stdlib_module_names)


def files_of(part: str) -> list[Path]:
    folder = FOLDERS.get(part, ROOT / "autopar" / part)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


SOURCES = [(part, path) for part in ORDER for path in files_of(part)]
"""Each test looks at all of them, and names each that is wrong: a test of its own for each file would cost more than the look."""


def imports(path: Path, part: str) -> Iterator[str]:
    """Absolute names of what the file imports; relative ones resolved within the part."""
    package = (
        ["autopar", part, *path.relative_to(FOLDERS.get(part, ROOT / "autopar" / part)).parts[:-1]]
        if path.name != f"{part}.py"
        else ["autopar"]
    )
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield stem
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def test_imports_run_one_way() -> None:
    wrong = []
    for part, path in SOURCES:
        for name in imports(path, part):
            words = name.split(".")
            if words[0] in ("passes", "cost_models", "tests"):
                wrong.append(f"{path} imports {name}: write autopar.{name}")
            if words[0] == "autopar" and len(words) > 1 and words[1] in ORDER and ORDER.index(words[1]) > ORDER.index(part):
                wrong.append(f"{path} imports {name}, which comes later in {ORDER}")
    assert not wrong, "\n".join(wrong)


def test_planning_does_not_read_published_runs() -> None:
    """Only the command line imports them, and planning reaches recipes by one module."""
    users = {part for part, path in SOURCES for name in imports(path, part) if name.startswith("autopar.validate")}
    assert users <= {"validate", "cli"}
    others = [(part, path) for part, path in SOURCES if part not in ("software", "validate", "cli")]
    reached = {name for part, path in others for name in imports(path, part)}
    assert {name for name in reached if name.startswith("autopar.software.")} <= {
        "autopar.software.by_hand", *(f"autopar.software.by_hand.{name}" for name in BY_HAND)
    }  # fmt: skip


BY_HAND = ("seeds_of", "with_expert_prices", "with_reasons", "with_stage_seeds")


def test_the_checker_trusts_nothing() -> None:
    """It judges what the compiler makes, so it imports nothing of it but the data that is judged."""
    wrong = []
    for path in files_of("checker"):
        for name in imports(path, "checker"):
            words = name.split(".")
            if words[0] == "autopar" and words[1:2] not in ([], ["checker"], ["errors"], ["ir"]):
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_runtime_needs_only_torch() -> None:
    """Export copies the folder: it must stand alone."""
    wrong = []
    for path in files_of("runtime"):
        for name in imports(path, "runtime"):
            root = name.split(".")[0]
            if root != "torch" and root not in STANDARD and not name.startswith("autopar.runtime"):
                wrong.append(f"{path} imports {name}")
        for node in syntax_nodes(path):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("autopar"):
                wrong.append(f"{path}: use a relative import")
    assert not wrong, "\n".join(wrong)


def test_ortools_is_imported_in_two_files() -> None:
    users = [path.name for part, path in SOURCES for name in imports(path, part) if name.split(".")[0] == "ortools"]
    assert set(users) <= {"solver_call.py", "synthesize.py"}


def test_every_subpackage_is_listed() -> None:
    """A folder that pyproject.toml does not name would be missing from the wheel; one that ORDER lacks has no place."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"autopar"}
    for part in ORDER:
        folder = FOLDERS.get(part, ROOT / "autopar" / part)
        found |= {".".join(("autopar", part, *path.parent.relative_to(folder).parts)) for path in folder.rglob("__init__.py")}
    assert found == set(setup["packages"])
    direct = {path.name for path in (ROOT / "autopar").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert direct <= set(ORDER), f"folders outside the declared order: {direct - set(ORDER)}"
    missing = [path for path in (ROOT / "autopar").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    assert not missing, f"folders without __init__.py: {missing}"
    modules = {path.stem for path in (ROOT / "autopar").glob("*.py")} - {"__init__", "__main__"}
    assert modules <= set(ORDER), f"modules outside the declared order: {modules - set(ORDER)}"


QUIET = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Pass)


def quiet(node: ast.stmt) -> bool:
    """Whether a module-level statement only declares."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return test in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
    return isinstance(node, QUIET)


def test_no_work_at_import() -> None:
    loud = [(path, node) for _, path in SOURCES for node in syntax_tree(path).body if not quiet(node)]
    wrong = [f"{path}:{node.lineno} runs at import: {ast.unparse(node)[:80]}" for path, node in loud]
    assert not wrong, "\n".join(wrong)


def test_no_environment_outside_cli() -> None:
    """The launcher's variables (rank, world size) are the runtime's and api's to read; nothing else is."""
    wrong = []
    for part, path in SOURCES:
        text = "" if part in ("cli", "runtime", "api") else path.read_text()
        wrong += [f"{path} reads the environment"] * ("os.environ" in text or "getenv" in text)
        wrong += [f"{path} imports pickle"] * ("pickle" in imports_of(path, part))
    assert not wrong, "\n".join(wrong)


def imports_of(path: Path, part: str) -> set[str]:
    return {name.split(".")[0] for name in imports(path, part)}


def test_importing_autopar_is_light() -> None:
    code = "import sys, autopar.cli; assert not {'torch', 'transformers', 'ortools', 'sympy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_top_level_of_the_repository() -> None:
    allowed = {
        "pyproject.toml",
        "autopar",
        "passes",
        "cost_models",
        "tests",
        "examples",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs",
        "Makefile",
        "constraints.txt",
    }
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert {path.split("/")[0] for path in tracked if not path.startswith(".")} <= allowed
