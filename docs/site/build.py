"""Build the site in build/site/html: stage pages, run Zensical, make the result work from the disk, check it.

make site
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import stage

SITE = stage.STAGE / "html"
SHIM = "https://unpkg.com/iframe-worker/shim"
LOCAL = "assets/javascripts/search-from-disk.js"


def finish(site: Path) -> None:
    """Replace what Zensical loads from elsewhere, and links to a folder by links to its page."""
    shutil.copy(Path(__file__).with_name("search.js"), site / LOCAL)
    for path in site.rglob("*.html"):
        up = os.path.relpath(site, path.parent)
        text = path.read_text()
        text = text.replace(SHIM, f"{up}/{LOCAL}")
        text = re.sub(
            r'<a href="[./]+" title="hypermlp"', f'<a href="{up}/index.html" title="hypermlp"', text
        )
        path.write_text(text)


def main() -> int:
    stage.main()
    command = [sys.executable, "-m", "zensical", "build", "-f", "zensical.toml", "--strict"]
    done = subprocess.run(command, cwd=stage.STAGE, check=False)
    if done.returncode:
        return done.returncode
    finish(SITE)
    return check.main([str(SITE)])


if __name__ == "__main__":
    sys.exit(main())
