"""Renders docs/source as PyTorch's own build would: same parser, same theme, no warning.

Upstream's conf.py is not in a wheel. `.ci/long docs` installs what this needs and runs it
in the staged environment, as autosummary reads the docstrings there.
"""

from pathlib import Path

import pytorch_sphinx_theme2  # pyrefly: ignore [missing-import]


project = "MoE for PyTorch"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
autosummary_generate = True
napoleon_use_ivar = True
templates_path = [
    "_templates",
    str(Path(pytorch_sphinx_theme2.__file__).parent / "templates"),
]
html_theme = "pytorch_sphinx_theme2"
html_theme_options = {"navigation_with_keys": False, "use_edit_page_button": False}
html_context = {"theme_variables": pytorch_sphinx_theme2.get_theme_variables()}
