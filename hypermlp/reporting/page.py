"""HTML pages from Jinja templates."""

from pathlib import Path
from typing import Any

from hypermlp.errors import UserError

HERE = Path(__file__).parent


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
