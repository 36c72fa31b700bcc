from __future__ import annotations

import json
from typing import Any

import pytest
from config_edits import edited
from hypothesis import given, settings

from ds_toolkit.config.fixes import apply_edit, apply_fixes
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.findings import Edit


def fixed(text: str) -> str:
    document = read_config_text(text)
    return apply_fixes(document, lint(document))[0].text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"train_batch_size": "8"}', '{"train_batch_size": 8}'),
        ('{"a": 1, "bfloat16": {"enabled": true}}', '{"a": 1, "bf16": {"enabled": true}}'),
        ("{bfloat16: {enabled: true}} # note", '{"bf16": {enabled: true}} # note'),
        (
            '{"zero_optimization": {"stage": 2, "cpu_offload": true}}',
            '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
        ),
        (
            '{"zero_optimization": {"stage": 3, "cpu_offload_param": false}}',
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}',
        ),
        ('{"zero_optimization": true}', '{"zero_optimization": {"stage": 1}}'),
        ('{"bf16": true}', '{"bf16": {"enabled": true}}'),
        ('{"prescale_gradients": "false"}', '{"prescale_gradients": false}'),
        (
            '{"zero_optimization": {"stage": 3, "reduce_bucket_size": "5e8"}}',
            '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 500000000}}',
        ),
        # A section in the wrong place: into what is there, into what is empty, into what is missing.
        (
            '{\n  "offload_param": {"device": "cpu"},\n  "zero_optimization": {\n    "stage": 3\n  }\n}',
            '{\n  "zero_optimization": {\n    "offload_param": {"device": "cpu"},\n    "stage": 3\n  }\n}',
        ),
        (
            '{"zero_optimization": {}, "offload_param": {"device": "cpu"}}',
            '{"zero_optimization": {"offload_param": {"device": "cpu"}}}',
        ),
        (
            '{"offload_param": {"device": "cpu"}}',
            '{"zero_optimization": {"offload_param": {"device": "cpu"}}}',
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 0.5}}}',
            '{"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}',
        ),
        # What is not safe stays.
        ('{"zero_optimisation": {"stage": 3}}', '{"zero_optimisation": {"stage": 3}}'),
        (
            '{"zero_optimization": true, "allgather_size": 1}',
            '{"zero_optimization": true, "allgather_size": 1}',
        ),
        (
            '{"offload_param": {}, "zero_optimization": "auto"}',
            '{"offload_param": {}, "zero_optimization": "auto"}',
        ),
    ],
)
def test_safe_fixes_change_what_is_wrong_and_nothing_else(before: str, after: str) -> None:
    assert fixed(before) == after


def test_several_fixes_are_made_in_turn_and_comments_stay() -> None:
    text = '{\n  // ours\n  "train_batch_size": "8", # all ranks\n  "bfloat16": {"enabled": true}\n}\n'
    document = read_config_text(text)
    edited_document, mended = apply_fixes(document, lint(document))
    assert [finding.code for finding in mended] == ["DS014", "DS011"]
    assert edited_document.text == text.replace('"8"', "8").replace("bfloat16", "bf16")


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ('{"a": 1, "b": 2}', Edit("/a", key="b")),
        ('{"a": 1}', Edit("/missing", value=2)),
        ('{"a": 1, "s": {"a": 2}}', Edit("/a", section="/s")),
        ('{"a": 1, "s": [1]}', Edit("/a", section="/s/t")),
        ('{"\\u0061": 1}', Edit("/a", key="b")),
        ('{"a": {"b": 1}, "a": {"b": 1}}', Edit("/a/b", value=2)),
    ],
    ids=["taken", "not there", "taken there", "into a list", "written with escapes", "said twice"],
)
def test_an_edit_that_cannot_be_proved_right_is_not_made(text: str, edit: Edit) -> None:
    assert apply_edit(read_config_text(text), edit) is None


def test_deep_nesting_is_left_alone() -> None:
    deep = json.loads("[" * 100 + "]" * 100)
    text = json.dumps({"train_batch_size": "8", "x": deep})
    assert json.loads(fixed(text))["train_batch_size"] == 8


@settings(max_examples=200, deadline=None)
@given(edited())
def test_what_was_mended_is_mended_and_nothing_new_is_wrong(config: dict[str, Any]) -> None:
    document = read_config_text(json.dumps(config, indent=1))
    before = lint(document)
    after_document, mended = apply_fixes(document, before)
    after = {(finding.code, finding.where.pointer) for finding in lint(after_document)}
    assert not after & {(finding.code, finding.where.pointer) for finding in mended}
    assert read_config_text(after_document.text).data == after_document.data
