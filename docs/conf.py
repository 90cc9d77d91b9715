"""Configuration of the site: `make docs` builds it from this folder into out/site."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from axon_nb import __version__  # noqa: E402
from scripts import site_pages  # noqa: E402

project = "axon_nb"
author = "axon_nb contributors"
project_copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
exclude_patterns = ["parity/*.md", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"axon_nb {__version__}"
if site_pages.REPOSITORY:
    html_theme_options = {
        "source_repository": f"{site_pages.REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # the notebooks start ranks; `make site-notebooks` runs them
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

setup = site_pages.setup
