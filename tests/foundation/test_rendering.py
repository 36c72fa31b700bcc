from __future__ import annotations

import jinja2
import pytest

from ds_toolkit.rendering import render, template_directory


def test_templates_are_found() -> None:
    assert (template_directory() / "ds_config" / "base.json.j2").is_file()


def test_a_template_ends_with_a_newline_and_has_no_line_for_its_tags() -> None:
    text = render("env/deepspeed_env.j2", variables={"A": "1", "B": "2"})
    assert text.endswith("\n")
    assert "" not in text.splitlines()


def test_a_missing_value_is_not_an_empty_text() -> None:
    with pytest.raises(jinja2.UndefinedError, match="variables"):
        render("env/deepspeed_env.j2", infiniband=True)
