"""What the manuals of the rules say of DeepSpeed's parser: each example is given to it."""

from __future__ import annotations

from typing import Any

import hjson
import pytest

from ds_toolkit.config.rules import RULES
from ds_toolkit.findings import Severity

# The parser stops at every Bad example of these; of the others they stop the engine, or nothing at all.
REFUSED_AT_THE_START = {
    "DS003",
    "DS004",
    "DS008",
    "DS009",
    "DS012",
    "DS022",
    "DS101",
    "DS102",
    "DS103",
    "DS301",
    "DS302",
    "DS304",
    "DS305",
    "DS404",
    "DS501",
}
# Of these the parser stops at some examples: it looks at values in the sections that it checks.
REFUSED_IN_CHECKED_SECTIONS = {
    "DS013",
    "DS014",
    "DS015",
    "DS017",
    "DS018",
    "DS019",
    "DS201",
    "DS205",
    "DS303",
}
EXAMPLES = [
    pytest.param(rule, example, kind, id=f"{rule.code}-{kind}-{number}")
    for rule in RULES
    for kind in ("bad", "good")
    for number, example in enumerate(getattr(rule, kind))
    # What another program resolves never reaches DeepSpeed like this.
    if "auto" not in example.text or "consumer" not in example.context
]


def is_refused(parse: Any, example: Any) -> bool:
    ranks = int(example.context.get("world_size", 1))
    try:
        parse(dict(hjson.loads(example.text, object_pairs_hook=dict)), ranks)
    except Exception:
        return True
    return False


@pytest.mark.parametrize(("rule", "example", "kind"), EXAMPLES)
def test_deepspeed_refuses_what_the_manuals_say_it_refuses(
    rule: Any, example: Any, kind: str, parse: Any
) -> None:
    refused = is_refused(parse, example)
    if kind == "good":
        assert not refused
    elif rule.code in REFUSED_AT_THE_START:
        assert refused
    elif rule.code not in REFUSED_IN_CHECKED_SECTIONS:
        assert not refused
    if refused:
        assert rule.severity is Severity.ERROR


@pytest.mark.parametrize("code", sorted(REFUSED_IN_CHECKED_SECTIONS))
def test_deepspeed_refuses_some_examples_of_rules_about_values(code: str, parse: Any) -> None:
    assert any(is_refused(parse, example) for example in RULES[code].bad)


# DeepSpeed leaves the file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_key_that_stands_twice_is_refused_in_a_file(parse: Any, tmp_path: Any) -> None:
    (example,) = RULES["DS007"].bad
    path = tmp_path / "ds_config.json"
    path.write_text(example.text)
    with pytest.raises(ValueError, match="Duplicate keys"):
        parse(str(path))
