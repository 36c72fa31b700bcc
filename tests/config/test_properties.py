"""What holds for any configuration: the linter never crashes, and never complains about good ones."""

from __future__ import annotations

import json

import pytest
from config_edits import GOOD, RANKS, edited, harmless_text
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.members import known_keys
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.config.schema import DsConfig

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*known_keys(DsConfig), "stage", "type", "params"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@pytest.mark.parametrize("config", GOOD)
def test_good_configurations_are_clean(config: dict[str, object]) -> None:
    assert lint(config, world_size=RANKS) == []


@settings(max_examples=300, deadline=None)
@given(harmless_text())
def test_harmless_edits_give_no_findings(text: str) -> None:
    assert lint(read_config_text(text), world_size=RANKS) == []


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(list(known_keys(DsConfig))) | st.text(max_size=4), ANYTHING, max_size=5),
    st.sampled_from(list(Consumer)),
    st.none() | st.integers(1, 64),
)
def test_no_data_makes_the_linter_crash(
    config: dict[str, object], consumer: Consumer, world_size: int | None
) -> None:
    for finding in lint(config, consumer=consumer, world_size=world_size):
        assert finding.message
        assert "\n" not in finding.message


@settings(max_examples=200, deadline=None)
@given(edited(), st.sampled_from(list(Consumer)))
def test_edited_configurations_have_places_for_all_findings(
    config: dict[str, object], consumer: Consumer
) -> None:
    document = read_config_text(json.dumps(config, indent=1))
    findings = lint(document, consumer=consumer, world_size=RANKS)
    assert all(finding.where.line and finding.where.column for finding in findings)
    assert {(found.code, found.where.pointer) for found in findings} == {
        (found.code, found.where.pointer)
        for found in lint(document.data, consumer=consumer, world_size=RANKS)
    }
