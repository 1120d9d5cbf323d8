"""Imports go one way, and importing the package pulls in nothing optional."""

import ast
import subprocess
import sys
from pathlib import Path

import hypermlp

ROOT = Path(hypermlp.__file__).parent
LEVELS = [
    {"errors", "cache", "files", "validation", "paper", "label", "config", "checkpoints"},
    {"ops", "reporting"},
    {"layers", "testing", "jobs"},
    {"models"},
    {"train", "mad"},
    {"costs", "study", "evals", "bench", "theory", "inspect", "demo", "serve"},
    {"commands", "cli", "__main__"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("hypermlp.")}
    return found


def test_imports_go_one_way():
    checked = 0
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for other in imported_parts(path):
            assert LEVEL[other] <= LEVEL[part], f"{path} imports hypermlp.{other}"
            checked += 1
    assert checked > 20


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
