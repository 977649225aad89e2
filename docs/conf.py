"""How Sphinx builds this site; ``make docs`` calls it with warnings as errors."""

from importlib.metadata import version as installed_version

project = "jupyter-gpu-pool"
author = "The jupyter-gpu-pool developers"
project_copyright = "2026, the jupyter-gpu-pool developers"
release = version = installed_version("jupyter-gpu-pool")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_google_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Types are named in signatures as the reader would write them, wherever they are defined.
python_use_unqualified_type_names = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "furo"
html_title = "jupyter-gpu-pool"
html_static_path = ["_static"]
html_css_files = ["motion.css"]
# Prompts are shown, and left out when a reader copies an example.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
