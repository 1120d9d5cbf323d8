"""Reports as HTML pages, from Jinja templates, and as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.errors import UserError
from hypermlp.reporting.table import Table

HERE = Path(__file__).parent
REPORT = HERE / "report.html"
COLOURS = 8  # classes c0, c1, ... in page.css


class Figure(NamedTuple):
    """A chart of a page."""

    chart: str
    """SVG."""
    caption: str = ""
    key: Mapping[str, str] = {}
    """Names of the curves with the CSS class of their colour."""


class Card(NamedTuple):
    """A box of a page."""

    title: str
    badge: str
    """One or more words; the first one is the CSS class of the badge."""
    text: str
    chart: str
    """SVG; empty for none."""
    note: str


class Section(NamedTuple):
    """A part of a report. The title, the note, the figures and the cards are shown on the page alone."""

    title: str = ""
    note: str = ""
    """How to read the section."""
    text: str = ""
    items: Sequence[str] = ()
    """Items of a list, which has the title in Markdown too."""
    figures: Sequence[Figure] = ()
    cards: Sequence[Card] = ()
    """Shown on the page instead of the table."""
    table: Table | None = None


def report_page(
    title: str, sections: Sequence[Section], about: str = "", numbers: Mapping[str, str] | None = None
) -> str:
    """Return a report as a page. ``numbers`` are shown at the top, by what they count."""
    return render(REPORT, title=title, about=about, numbers=numbers or {}, sections=sections)


def report_markdown(sections: Sequence[Section]) -> str:
    """Return the lists, texts and tables of a report in Markdown."""
    parts = []
    for section in sections:
        if section.items:
            parts.append("\n".join([f"{section.title}:", "", *(f"- {item}" for item in section.items)]))
        if section.text:
            parts.append(section.text)
        if section.table:
            parts.append(section.table.markdown())
    return "\n\n".join(parts) + "\n"


def render(template: Path, **values: Any) -> str:
    """Return the page of a Jinja template that extends "page.html".

    Values are escaped, except those that pass through the filter ``chart``, which must be HTML or SVG.
    """
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise UserError("pages need Jinja: pip install 'hypermlp[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["chart"] = markupsafe.Markup
    files = {
        name: markupsafe.Markup((HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")
    }
    return environment.get_template(template.name).render(**files, **values)
