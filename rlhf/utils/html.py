"""Pages that are one file, from the templates beside this module. Text from models is data: escaped, and visible."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.utils.console import visible

TEMPLATES = Path(__file__).parent / "templates"
_MARKS = re.compile(r"([\\`*_\[\]|~$#]|:(?=[\w+-]+:))")  # what acts inside a line: marks, maths, issues, emoji
_LINKS = {"://": ":&#47;&#47;", "@": "&#64;"}  # what GitHub would make a link of
_WWW = re.compile(r"(www)\.", re.IGNORECASE)


def render(template: str, **data: Any) -> str:
    """A template filled in. Every value is escaped for HTML, unless the template is Markdown.

    Filters: `text` for what a model or a user wrote (control and direction characters made visible), `cell` for the
    same within a Markdown table, `tojson` for data inside a script element.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": visible, "cell": markdown_cell}
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": True}
    return environment.get_template(template).render(**data)


def markdown_cell(text: str) -> str:
    """Any text as one cell of a Markdown table, where nothing of it acts: no link, no picture, no HTML."""
    escaped = _MARKS.sub(r"\\\1", html.escape(visible(text), quote=False))
    for written, harmless in _LINKS.items():
        escaped = escaped.replace(written, harmless)
    escaped = _WWW.sub(r"\1&#46;", escaped)
    return escaped.replace("\n", "<br>").replace("\t", " ")
