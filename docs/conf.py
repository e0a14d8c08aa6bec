"""How Sphinx builds the documentation; CONTRIBUTING.md has the command.

The source folder is the repository's top, so that a link from a page to a report, or from a report to a page, is the
same in a checkout and on the site.
"""

from memo_sim import __version__

project = "memo"
author = "the memo authors"
copyright = f"2026, {author}"
version = release = __version__

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "reports/*.md"]
exclude_patterns = [".venv", "build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

add_module_names = False
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
smartquotes = False  # it would turn the dashes of an option into one

html_extra_path = ["../llms.txt", "SKILL.md"]  # agents look for them at the top of a site
html_theme = "furo"
html_title = f"memo {version}"
