"""Text made from the templates that come with the toolkit."""

from __future__ import annotations

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def template_directory() -> Path:
    """Where the templates lie: `ds_toolkit/templates` when installed, `templates/` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def render(template: str, **values: object) -> str:
    """The text of one template; a value that it needs and does not get raises `jinja2.UndefinedError`."""
    environment = Environment(  # noqa: S701  (configs and shell text, never HTML)
        loader=FileSystemLoader(template_directory()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # For shell scripts: one word, whatever is in it.
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(**values)
