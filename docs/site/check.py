"""Check the built site: links and anchors resolve, nothing is loaded from elsewhere, no name is missing.

python docs/site/check.py build/site/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import stage

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The links, loaded files and anchors of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return what is wrong with a site, one line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in page.links + page.loaded:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{name} links to {url}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {url}, whose anchor does not exist")
    for module in stage.API:
        page = pages.get((site / "api" / f"{module}.html").resolve())
        names = [f"{module}.{name}" for name in stage.public_names(module)]
        found += [f"the API has no {name}" for name in names if page is None or name not in page.anchors]
    return found


def main(words: list[str]) -> int:
    site = Path(words[0])
    found = problems(site)
    print(*found, sep="\n")
    print(f"{len(found)} problems on {sum(1 for _ in site.rglob('*.html'))} pages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
