"""Write the pages that come from the code: docs/rules.md from the docstrings of the rules (`make docs`)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ds_toolkit.cli.catalogue import all_rules
from ds_toolkit.config.schema import SUPPORTED_DEEPSPEED

OLDEST, NEWEST = SUPPORTED_DEEPSPEED
FOLDER = Path(__file__).parent
FAMILIES = {
    "DS00": "Keys, sections and values",
    "DS01": "Keys, sections and values",
    "DS02": "Keys, sections and values",
    "DS10": "Batch sizes",
    "DS11": "Optimizer",
    "DS12": "Scheduler",
    "DS2": "ZeRO",
    "DS3": "Precision",
    "DS4": "Offloading",
    "DS55": "Several files at once",
    "DS5": "Communication",
    "DS6": "Checkpoints",
    "DS70": "Environment file: lines",
    "DS72": "Environment file: variables",
    "DS75": "Hostfile",
    "DS8": "Consumers",
}


def rules_page() -> str:
    """The manual of all rules as Markdown, with a table in front."""
    rules = list(all_rules().values())
    lines = [
        "# Rules",
        "",
        "<!-- Written by `make docs` from the docstrings of the rules; change those. -->",
        "",
        f"`ds-toolkit lint` knows {len(rules)} rules. Codes are permanent. `ds-toolkit explain CODE` prints",
        "a rule's manual; `--ignore CODE` leaves it out. Of the examples every *Bad* one fires exactly its",
        "own rule, and every *Good* one is clean under all of them; the tests hold that.",
        "",
        f"What DeepSpeed knows is written down for versions {OLDEST} to {NEWEST}. On a newer one, keys that",
        "are not known here are warnings instead of errors.",
        "",
    ]
    for family in dict.fromkeys(_family(rule) for rule in rules):
        members = [rule for rule in rules if _family(rule) == family]
        lines += [f"- [{family}](#{_anchor(family)}): {members[0].code} to {members[-1].code}"]
    for family in dict.fromkeys(_family(rule) for rule in rules):
        members = [rule for rule in rules if _family(rule) == family]
        lines += ["", f"## {family}", "", "| code | name | severity |", "|---|---|---|"]
        lines += [
            f"| [{rule.code}](#{_anchor(_title(rule))}) | {rule.name} | {rule.severity.value} |"
            for rule in members
        ]
        for rule in members:
            lines += ["", f"### {_title(rule)}", "", *_manual(rule)]
    return "\n".join(lines) + "\n"


def _family(rule: Any) -> str:
    return next(
        (name for prefix, name in FAMILIES.items() if rule.code.startswith(prefix)), "Several files at once"
    )


def _title(rule: Any) -> str:
    return f"{rule.code} {rule.name}"


def _anchor(title: str) -> str:
    kept = "".join(mark for mark in title.lower() if mark.isalnum() or mark in " -")
    return kept.replace(" ", "-")


def _manual(rule: Any) -> list[str]:
    prose = rule.manual.partition("\nBad")[0].rstrip()
    lines = [f"*{rule.severity.value}*: {prose}"]
    for kind, examples in (("Bad", rule.bad), ("Good", rule.good)):
        for example in examples:
            context = ", ".join(f"{key} {value}" for key, value in example.context.items() if key != "text")
            lines += [
                "",
                f"{kind}{f' ({context})' if context else ''}:",
                "",
                textwrap.indent(example.text, "    "),
            ]
    return lines


if __name__ == "__main__":
    (FOLDER / "rules.md").write_text(rules_page())
