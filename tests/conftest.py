"""What all tests share: reproducible randomness, two threads at most, one fixture per backend."""

import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from hypermlp.ops.dispatch import BACKENDS

# PyTorch caches compiled graphs by the operators' names alone: another version's gradients would be used.
_SOURCES = sorted((Path(__file__).parents[1] / "hypermlp" / "ops").rglob("*.py"))
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"hypermlp-inductor-{_VERSION}")
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def server():
    """Processes that begin with everything imported.

    Started here, because whoever starts the one fork server chooses the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypermlp.train.run", "hypermlp.mad.training"])
    process = context.Process(target=sys.exit)
    process.start()
    process.join()
    return context


@pytest.fixture
def set_threads():
    """``torch.set_num_threads``, undone after the test."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture(params=[*BACKENDS, "native, 1 thread"])
def backend(request, set_threads):
    name, *one_thread = request.param.split(", ")
    reason = BACKENDS[name].unavailable()
    if reason is not None:
        pytest.skip(f"backend {name} is not available: {reason}")
    set_threads(1 if one_thread else 2)
    return name


@pytest.fixture
def poisoned_memory():
    """Fill the memory of new tensors with NaN, so that a value that is never written shows.

    The native kernels allocate by themselves: ``make poison`` does the same there.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiler():
    """torch.compile with nothing left over from other tests:

    it counts recompilations per function, not per layer.
    """
    torch.compiler.reset()
    return torch.compile


SCREENS = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1200, "height": 900}}


@pytest.fixture(scope="session")
def chromium():
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium):
    """``browser(file, "phone" or "desk")`` opens a page, which must be readable, fit its screen, ask for
    nothing and report no error.
    """
    opened = []

    def open_page(file, screen):
        view, problems, asked = chromium.new_page(viewport=SCREENS[screen]), [], []
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        view.on("request", lambda request: asked.append(request.url))
        view.goto(file.as_uri())
        opened.append((view, problems, asked, [file.as_uri()]))
        assert view.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen]["width"], (
            "something sticks out"
        )
        heights = (
            "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height || 99)"
        )
        assert view.evaluate(f"Math.min(99, ...{heights})") >= 8, "text of a few pixels"
        return view

    yield open_page
    for view, problems, asked, expected in opened:
        assert problems == []
        assert asked == expected, "a page comes from one file"
        view.close()
