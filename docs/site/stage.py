"""Stage the pages of the site in build/site: documents, API, examples, recipes, model cards, records.

    make site

The documents keep their links between files of the repository. Every link is rewritten to the page or the
file that shows its target; a link whose target the site does not have is an error.
"""

import ast
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "site"
PAGES = STAGE / "pages"
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)|(?<=src=\")([^\"]+)(?=\")")
API = ("hypermlp", *(f"hypermlp.{name}" for name in ("layers", "ops", "models", "mad", "inspect")))
OTHERS = {  # documented names outside the lists ``__all__``
    "hypermlp.errors": ["UserError"],
    "hypermlp.label": ["Label", "PaperRow"],
    "hypermlp.layers.state": ["DecodingState"],
    "hypermlp.ops.dispatch": ["use_backend"],
    "hypermlp.ops.native": ["scratch_peak"],
    "hypermlp.costs.mixer": [
        "parameter_table", "parameter_count", "flops_table", "forward_flops", "core_flops", "state_bytes"
    ],
}  # fmt: skip


def page_places() -> dict[str, str]:
    """Return the page or file of the site, by the path in the repository that it shows."""
    places = {"README.md": "index.md", "CITATION.cff": "project/CITATION.cff"}
    for name in ("CONTRIBUTING", "CHANGELOG", "RELEASING", "SECURITY"):
        places[f"{name}.md"] = f"project/{name.lower()}.md"
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not name.startswith("docs/site/") and path.suffix != ".pyc":
            places[name] = name.removeprefix("docs/")
    places["docs/results/README.md"] = "results/index.md"
    for path in sorted((ROOT / "docs" / "results").rglob("*")):
        if path.is_dir():
            places[path.relative_to(ROOT).as_posix()] = "results/index.md"
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            places[f"examples/{path.name}"] = f"examples/{path.stem}.md"
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        places[f"recipes/{path.name}"] = "recipes/index.md"
    for path in sorted((ROOT / "hypermlp" / "checkpoints").glob("*/README.md")):
        places[path.relative_to(ROOT).as_posix()] = f"models/{path.parent.name}.md"
    return places | {"examples": "examples/index.md", "recipes": "recipes/index.md"}


def rewrite_links(text: str, origin: str, places: dict[str, str], page: str = "") -> str:
    """Return the text of a Markdown file ``origin`` with links to the pages of the site.

    ``page`` is where the text is shown, if that is not the place of ``origin``.
    """
    here = os.path.dirname(page or places[origin])

    def replace(match: re.Match[str]) -> str:
        link = match[1] or match[2]
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not target:
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(origin), target))
        if path not in places:
            raise SystemExit(f"{origin} links to {link}, which the site does not have")
        new = os.path.relpath(places[path], here or ".") + (f"#{anchor}" if anchor else "")
        return match[0].replace(link, new)

    blocks = re.split(r"(?ms)(^```.*?^```$)", text)  # odd ones are code
    return "".join(block if i % 2 else LINK.sub(replace, block) for i, block in enumerate(blocks))


def write(page: str, text: str) -> None:
    path = PAGES / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def stage_documents(places: dict[str, str]) -> None:
    for origin, page in places.items():
        path = ROOT / origin
        if path.is_dir() or path.suffix in (".py", ".ipynb", ".yaml"):
            continue
        if path.suffix == ".md":
            text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)  # a model card's header
            write(page, rewrite_links(text, origin, places))
        else:
            (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, PAGES / page)


def fence(code: str, language: str) -> str:
    return f"```{language}\n{code.rstrip()}\n```\n"


def stage_examples(places: dict[str, str]) -> None:
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        write(f"examples/{path.stem}.md", f"# {path.name}\n\n{fence(path.read_text(), 'python')}")
        rows.append(f"| [{path.name}]({path.stem}.md) | {docstring.splitlines()[0]} |")
    rows.append(
        "| [quickstart.ipynb](quickstart.md) | The layer, decoding, a trained model and its memory. |"
    )
    table = "\n".join(["| example | what it does |", "| --- | --- |", *rows])
    write(
        "examples/index.md",
        f"# Examples\n\nEach is one file that runs in a minute or two on a CPU.\n\n{table}\n",
    )
    path = ROOT / "examples" / "quickstart.ipynb"
    parts, images = [], 0
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(rewrite_links(source, "examples/quickstart.ipynb", places))
            continue
        parts.append(fence(source, "python"))
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(fence("".join(output["text"]), "text"))
            if "image/png" in output.get("data", {}):
                images += 1
                uri = f"data:image/png;base64,{output['data']['image/png']}"
                parts.append(f'<img alt="Output of the cell above" src="{uri}">')
    write("examples/quickstart.md", "\n\n".join(parts) + "\n")


def stage_recipes() -> None:
    parts = ["# Recipes", "`hypermlp train NAME` trains one; copy a file and edit it for your own."]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        parts += [f"## {path.stem}", fence(path.read_text(), "yaml")]
    write("recipes/index.md", "\n\n".join(parts))


def module_path(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """Return the names in ``__all__`` of a module, without importing it."""
    for node in ast.parse(module_path(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise SystemExit(f"{module} has no __all__")


def definition(module: str, name: str) -> tuple[str, int]:
    """Return the module and the line that define a name, following imports inside the package."""
    for node in ast.parse(module_path(module).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node.lineno
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return module, node.lineno
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return module, node.lineno
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(node.module, alias.name)
    raise SystemExit(f"{module}.{name} has no definition")


def fenced_docstrings(code: str) -> str:
    """Return Python code in whose docstrings literal blocks, which follow "::", are blocks of Markdown."""

    def replace(match: re.Match[str]) -> str:
        indent, title = match[1], match[2]
        block = textwrap.indent(textwrap.dedent(match[3]).strip("\n"), indent)
        language = "python" if title.startswith("Example") else "text"
        return f"{indent}{title}:\n\n{indent}```{language}\n{block}\n{indent}```\n\n"

    return re.sub(r"(?m)^( *)(\S.*\w)::\n\n((?:\1    .*\n|\n)+)", replace, code)


def stage_package() -> None:
    """Copy the package for the API reference."""
    for path in sorted((ROOT / "hypermlp").rglob("*.py")):
        copy = STAGE / "package" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(fenced_docstrings(path.read_text()))


def stage_api() -> None:
    sources: set[str] = set()
    overview = ["# API reference", "Every public name, from its docstring, with a link to its source."]

    def entry(module: str, name: str) -> str:
        where, line = definition(module, name)
        sources.add(where)
        source = os.path.relpath(module_path(where), ROOT)
        link = f"../source/{where}.md#__codelineno-0-{line}"
        return f"::: {module}.{name}\n\n[Source: {source}, line {line}]({link}){{ .source }}\n"

    def summary(module: str, names: list[str], page: str) -> None:
        links = ", ".join(f"[`{name}`]({page}#{module}.{name})" for name in names)
        overview.append(f"**{module}**: {links}")

    for module in API:
        names = public_names(module)
        summary(module, names, f"{module}.md")
        entries = "\n".join(entry(module, name) for name in names)
        about = f"::: {module}\n    options:\n      members: false\n      show_root_heading: false\n"
        write(f"api/{module}.md", f"# {module}\n\n{about}\n{entries}")
    parts = ["# Other modules"]
    for module, names in OTHERS.items():
        summary(module, names, "others.md")
        parts += [f"## {module}", *(entry(module, name) for name in names)]
    write("api/others.md", "\n\n".join(parts))
    write("api/index.md", "\n\n".join(overview) + "\n")
    for module in sorted(sources):
        code = module_path(module).read_text().rstrip()
        hidden = "---\nsearch:\n  exclude: true\n---\n\n"
        write(f"source/{module}.md", f'{hidden}# {module}\n\n``` {{ .python linenums="1" }}\n{code}\n```\n')


def main() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    places = page_places()
    steps: list[Callable[[], None]] = [
        lambda: stage_documents(places), lambda: stage_examples(places), stage_recipes, stage_package,
        stage_api,
    ]  # fmt: skip
    for step in steps:
        step()
    shutil.copy(Path(__file__).with_name("zensical.toml"), STAGE / "zensical.toml")
    print(f"staged {sum(1 for _ in PAGES.rglob('*.md'))} pages in {STAGE}")


if __name__ == "__main__":
    sys.exit(main())
