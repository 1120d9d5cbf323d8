"""Imports go one way, and importing the package pulls in nothing optional."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import hypermlp

ROOT = Path(hypermlp.__file__).parent
LEVELS = [
    {"errors", "cache", "files", "sealed", "validation", "paper", "label", "config", "checkpoints"},
    {"ops", "reporting"},
    {"layers", "testing", "jobs"},
    {"models"},
    {"train", "mad"},
    {"costs", "study", "evals", "bench", "theory", "inspect", "demo", "serve"},
    {"commands", "cli", "__main__"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}


def imported_parts(text: str) -> set[str]:
    """Return the parts of the package that a module imports, at its top or within a function."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "hypermlp":
            names |= {f"hypermlp.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("hypermlp.")} - set(hypermlp.__all__)


def imports() -> dict[str, set[str]]:
    """Return what each part of the package imports from the others."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part != "__init__":
            found.setdefault(part, set()).update(imported_parts(path.read_text()) - {part, "__version__"})
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the parts that import each other, directly or not; empty if there are none."""
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_go_one_way():
    graph = imports()
    assert len(graph) > 20
    for part, others in graph.items():
        for other in others:
            assert LEVEL[other] <= LEVEL[part], f"{part} imports {other}"
    assert cycle(graph) == []


def test_all_forms_of_imports_are_seen():
    text = "import hypermlp.ops.api\nfrom hypermlp import mad\ndef f():\n    from hypermlp.train import data"
    assert imported_parts(text) == {"ops", "mad", "train"}
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_importing_is_lean():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import hypermlp, hypermlp.ops, hypermlp.layers;"
        "print({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = ast.literal_eval(done.stdout)
    assert new <= {"hypermlp", "torch", "numpy"}, new


def test_benchmark_of_the_layer_needs_only_pytorch():
    optional = ["transformers", "tokenizers", "accelerate", "datasets", "yaml", "matplotlib", "jinja2"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({optional}));"
        "from hypermlp.cli import main; sys.exit(main(['bench', 'op', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
