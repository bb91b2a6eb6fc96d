"""Sphinx's configuration: MyST pages, tables made from the code, the API from docstrings; nothing from the network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import trio_infer

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from generated import GENERATED

project = "trio-infer"
author = "the trio-infer authors"
copyright = "the trio-infer authors"  # noqa: A001 - the name that Sphinx looks for
release = version = trio_infer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"trio-infer {release}"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
suppress_warnings = ["myst.header"]

default_role = "code"  # docstrings write `code` with single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!trio_infer\.).*"),
    (r"py:.*", r"trio_infer\.(api|models|observe|protocol|scheduling|wire)\..*"),
]


class Generated(SphinxDirective):
    """Puts in what a function of `_ext/generated.py` makes of the code."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(GENERATED[self.arguments[0]]())


def resolve_public_name(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """References to `trio_infer.wire.primitive.DisconnectWatch` mean `trio_infer.DisconnectWatch`."""
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or not target.startswith("trio_infer.") or name not in trio_infer.__all__:
        return None
    found: nodes.Node | None = env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"trio_infer.{name}", node, content
    )
    return found


_as_written: dict[str, list[str]] = {}


def before_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes `a, b: text` for a `b` of the type `a`, and what is before a colon in an attribute's text, too."""
    if what == "attribute":
        _as_written[name] = list(lines)
    for index, line in enumerate(lines):
        names = re.match(r"\s+\w+(?:, \w+)+: ", line)
        if names and "Attributes:" in lines[:index]:
            lines[index] = names[0].rstrip().replace(", ", "/") + line[names.end() - 1 :]


def after_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _as_written.pop(name, lines)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.add_directive("generated", Generated)
    app.connect("missing-reference", resolve_public_name)
