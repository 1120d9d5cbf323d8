"""The site: links lead to its pages, its checks find mistakes, and it works in a browser from the disk."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "site"))
import check
import stage

SITE = Path(stage.__file__).parent

PAGES = ("index", "getting-started", "performance", "study", "api/hypermlp.ops", "examples/quickstart")
PLACES = {
    "docs/train.md": "train.md",
    "docs/results/a": "results/index.md",
    "CHANGELOG.md": "project/changelog.md",
}


def test_links_are_rewritten_to_pages():
    text = (
        "[a](results/a) [b](../CHANGELOG.md#changed) [c](https://x.org) [d](#here)\n```\n[e](nowhere)\n```\n"
    )
    expected = text.replace("results/a", "results/index.md").replace("../CHANGELOG", "project/changelog")
    assert stage.rewrite_links(text, "docs/train.md", PLACES) == expected
    with pytest.raises(SystemExit, match=r"docs/train\.md links to gone\.md, which the site does not have"):
        stage.rewrite_links("[x](gone.md)", "docs/train.md", PLACES)


def test_everything_is_staged(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "STAGE", tmp_path)
    monkeypatch.setattr(stage, "PAGES", tmp_path / "pages")
    stage.main()
    documents = {path.name for path in (SITE.parent).glob("*.md")}
    assert documents <= {path.name for path in (tmp_path / "pages").iterdir()}
    config = (tmp_path / "zensical.toml").read_text()
    for name in documents | {f"api/{module}.md" for module in stage.API}:
        assert f'"{name}"' in config, f"docs/site/zensical.toml has no {name} in its navigation"


def test_the_reference_has_every_documented_name():
    for module, names in [(name, stage.public_names(name)) for name in stage.API] + [*stage.OTHERS.items()]:
        for name in names:
            where, line = stage.definition(module, name)
            assert name in stage.module_path(where).read_text().splitlines()[line - 1]
    assert stage.definition("hypermlp", "HyperGLU")[0] == "hypermlp.layers.labelled"


def test_mistakes_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "API", ("hypermlp",))
    monkeypatch.setattr(stage, "public_names", lambda module: ["HyperGLU"])
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"><a href="b.html#gone"><a href="c.html"><script src="https://x.org/s.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1>')
    assert check.problems(tmp_path) == [
        "a.html loads https://x.org/s.js",
        "a.html links to b.html#gone, whose anchor does not exist",
        "a.html links to c.html, which does not exist",
        "the API has no hypermlp.HyperGLU",
    ]


def test_docstrings_are_staged_as_markdown():
    code = '''
def double(x):
    """Return ``2 x``.

    Example::

        y = double(2)

        assert y == 4
    """
'''
    shown = stage.fenced_docstrings(code)
    assert "    Example:\n\n    ```python\n    y = double(2)\n\n    assert y == 4\n    ```\n" in shown
    assert ast.parse(shown)


@functools.cache
def built() -> Path:
    python = os.environ.get("SITE_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("the builder of the site is not installed; `make test-all` installs it")
    subprocess.run([python, str(SITE / "build.py")], check=True, capture_output=True)
    return stage.STAGE / "html"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("javascript", [True, False])
def test_pages_in_a_browser(chromium, width, javascript):
    """They open from the disk without a network, fit the screen, and report no error."""
    context = chromium.new_context(
        viewport={"width": width, "height": 800}, java_script_enabled=javascript, offline=True
    )
    for name in PAGES:
        view, problems = context.new_page(), []
        view.on("pageerror", lambda error, found=problems: found.append(str(error)))
        view.on(
            "console", lambda line, found=problems: found.append(line.text) if line.type == "error" else None
        )
        view.on("requestfailed", lambda request, found=problems: found.append(request.url))
        view.goto((built() / f"{name}.html").as_uri())
        assert view.locator("h1").first.is_visible()
        if javascript:
            assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert problems == [], name
        view.close()
    context.close()


@pytest.mark.slow
def test_search_from_the_disk(chromium):
    context = chromium.new_context(offline=True)
    view = context.new_page()
    view.goto((built() / "index.html").as_uri())
    view.keyboard.press("Control+k")
    box = view.get_by_placeholder("Search").first
    box.wait_for()
    result = view.locator("a[href*='long-context']").filter(has_text="Sliding windows")
    assert result.count() == 0, "the page has the link without a search"
    box.press_sequentially("sliding window")
    assert box.input_value() == "sliding window"
    result.first.wait_for(timeout=10_000)
    result.first.click()
    assert "/long-context.html" in view.url
    assert "Beyond the context" in view.locator("h1").first.inner_text()
    context.close()
