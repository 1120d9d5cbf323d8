"""Every file and every name that docs/derivation.md cites exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "derivation.md"
CITATION = re.compile(r"`([\w./-]+\.(?:py|cpp|h))(?:: ([\w.]+))?`")
WITHOUT_FILE = re.compile(r"`[A-Z]\w*\.\w+[^`]*`")


def citations(text: str) -> list[tuple[str, str]]:
    """Return every cited (path, name) of a Markdown text, once; the name of a plain `path` is empty."""
    return list(dict.fromkeys(CITATION.findall(text)))


def defined_names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return the functions, classes and variables that the statements define; members as ``Class.name``."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= defined_names(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def problem(path: str, name: str) -> str | None:
    """Return what is wrong with a citation, or None."""
    file = ROOT / path
    if not file.is_file():
        return f"{path} does not exist"
    if name and name not in defined_names(ast.parse(file.read_text()).body):
        return f"{path} does not define {name}"
    return None


def cases() -> list[object]:
    found = citations(DOCUMENT.read_text())
    return [pytest.param(path, name, id=f"{path}:{name}") for path, name in found]


@pytest.mark.parametrize(("path", "name"), cases())
def test_citation_exists(path, name):
    assert problem(path, name) is None


def test_there_are_citations_of_every_form():
    found = citations(DOCUMENT.read_text())
    assert len([name for _, name in found if name]) >= 15
    assert [name for _, name in found if "." in name], "no method is cited"
    assert [path for path, name in found if not name], "no file is cited alone"


def test_members_are_cited_with_their_file():
    assert WITHOUT_FILE.findall("`Mixer.forward`: `q`, `Mixer.forward: q * q_gate`, `Mix(diag=p)`") == [
        "`Mixer.forward`",
        "`Mixer.forward: q * q_gate`",
    ]
    assert not WITHOUT_FILE.findall(DOCUMENT.read_text())


def test_citations_are_parsed():
    text = "`hypermlp/a.py: f`, `hypermlp/a.py: C.method`, `csrc/b.h`, `not code`, `hypermlp/a.py: f` again"
    assert citations(text) == [("hypermlp/a.py", "f"), ("hypermlp/a.py", "C.method"), ("csrc/b.h", "")]


@pytest.mark.parametrize(
    ("path", "name", "wrong"),
    [
        ("hypermlp/ops/nowhere.py", "trace", "does not exist"),
        ("ops/reference.py", "", "does not exist"),
        ("hypermlp/ops/reference.py", "no_such_name", "does not define"),
        ("hypermlp/ops/reference.py", "torch", "does not define"),
        ("hypermlp/layers/mixer.py", "forward", "does not define"),
        ("hypermlp/layers/mixer.py", "Mixer.no_such_method", "does not define"),
    ],
)
def test_a_wrong_citation_is_found(path, name, wrong):
    assert wrong in (problem(path, name) or "")


def test_methods_fields_and_constants_are_found():
    source = "X = 1\nY: int = 2\nclass C:\n    field: int\n    def method(self): ...\n"
    assert defined_names(ast.parse(source).body) == {"X", "Y", "C", "C.field", "C.method"}
