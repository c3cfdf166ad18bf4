"""How Sphinx builds the site of these pages: `make site`."""

from otel_ddp import __version__ as release

project = "otel_ddp"
copyright = "the otel_ddp authors"
extensions = ["myst_parser"]

# The pages read the same on a code forge: plain Markdown, and an anchor for every heading.
myst_heading_anchors = 4
# Pygments takes the colons in the names of recorded series for a mistake.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"otel_ddp {release}"
html_copy_source = False
