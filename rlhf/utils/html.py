"""Renders self-contained HTML pages and the model card (Markdown) from templates/. Text from models is escaped."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.utils.console import number
from rlhf.utils.errors import visible

TEMPLATES = Path(__file__).parent / "templates"
_MARKS = re.compile(
    r"([\\`*_\[\]|~$#]|:(?=[\w+-]+:))"
)  # Markdown syntax inside a line: emphasis, maths, issues, emoji
_LINKS = {"://": ":&#47;&#47;", "@": "&#64;"}  # GitHub makes links of these
_WWW = re.compile(r"(www)\.", re.IGNORECASE)


def render(template: str, **data: Any) -> str:
    """Return a template filled with `data`. Values are escaped for HTML, unless the template is Markdown.

    Filters: `text` for text of a model or a user (makes control and direction characters visible), `cell` for the same
    in a Markdown table, `number` for figures, `tojson` for data in a script element.
    """
    return _environment(template.endswith(".html")).get_template(template).render(**data)


@functools.cache  # compiling a template takes longer than rendering it
def _environment(autoescape: bool) -> Environment:
    """Return the environment of the templates, with their filters."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"text": visible, "cell": markdown_cell, "number": number}
    made.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": True}
    return made


def markdown_cell(text: str) -> str:
    """Return text as a cell of a Markdown table, escaped so that it contains no links, images or HTML."""
    escaped = _MARKS.sub(r"\\\1", html.escape(visible(text), quote=False))
    for written, harmless in _LINKS.items():
        escaped = escaped.replace(written, harmless)
    escaped = _WWW.sub(r"\1&#46;", escaped)
    return escaped.replace("\n", "<br>").replace("\t", " ")
