"""The site: `python -m sphinx -W --keep-going -b html docs build/site`, with the extra `docs` installed.

Code in the pages is run; an exception ends the build. What was run is kept in `build/site-cache` until the code, this
package or a package that it uses changes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sphinx.application import Sphinx

from sardonyx import __version__

_DOCS = Path(__file__).resolve().parent
_CACHE = _DOCS.parent / "build" / "site-cache"
sys.path[:0] = [str(_DOCS), str(_DOCS.parent)]  # for _site, and for benchmarks, which it imports
os.environ["SARDONYX_CACHE_DIR"] = str(_CACHE / "sardonyx")  # never the user's own
os.environ["XDG_CACHE_HOME"] = str(_CACHE / "home")  # an Options object reads no variable of ours

project = "sardonyx"
author = "the authors of sardonyx"
copyright = "the authors of sardonyx, Apache-2.0"
version = release = __version__

extensions = ["myst_nb"]
exclude_patterns = ["_site"]
myst_heading_anchors = 3

nb_custom_formats = {".md": ["_site.notebook.read", {}]}
nb_execution_mode = "cache"
nb_execution_cache_path = str(_CACHE / "pages")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # a page shows what its code prints
nb_merge_streams = True

html_theme = "furo"
html_title = f"sardonyx {version}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Read every page anew: what it shows follows from the package and from results too, not from its text alone."""
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: sorted(env.found_docs))
