"""Write the pages that come from the code (`make docs`).

docs/rules.md comes from the docstrings of the rules, docs/variables.md from the table of variables,
docs/diagnose.md from the known failures and what stands before them in docs/diagnose-head.md.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from ds_toolkit.cli.catalogue import all_rules, rules_of_checkpoints, rules_of_hosts, rules_of_scripts
from ds_toolkit.config.schema import SUPPORTED_DEEPSPEED
from ds_toolkit.doctor.signatures import SIGNATURES
from ds_toolkit.doctor.signatures.signature import Signature
from ds_toolkit.env.variables import REPLACED, VARIABLES

OLDEST, NEWEST = SUPPORTED_DEEPSPEED
FOLDER = Path(__file__).parent
DIAGNOSE_HEAD = (FOLDER / "diagnose-head.md").read_text()
FAMILIES = {
    "DS00": "Keys, sections and values",
    "DS01": "Keys, sections and values",
    "DS02": "Keys, sections and values",
    "DS10": "Batch sizes",
    "DS11": "Optimizer",
    "DS12": "Scheduler",
    "DS13": "Optimizer: what its implementation refuses",
    "DS14": "Scheduler: those of torch",
    "DS15": "Scheduler: curves other than they look",
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
    "DS9": "Checkpoints on disk",
}
# Codes of four digits are no members of the families above, whose names they begin with.
FAMILIES_OF_FOUR_DIGITS = {
    "DS100": "Scripts: loading",
    "DS101": "Scripts: calls that only some ranks make",
    "DS102": "Scripts: partitioned weights and checkpoints",
    "DS103": "Scripts: batches",
    "DS104": "Scripts: beside the engine",
    "DS11": "Hosts, before a job",
}


def rules_page() -> str:
    """The manual of all rules as Markdown, with a table in front."""
    rules = list(all_rules().values())
    num_of_verify, num_of_scripts, num_of_hosts = map(
        len, (rules_of_checkpoints(), rules_of_scripts(), rules_of_hosts())
    )
    num_of_lint = len(rules) - num_of_verify - num_of_scripts - num_of_hosts
    lines = [
        "# Rules",
        "",
        "<!-- Written by `make docs` from the docstrings of the rules; change those. -->",
        "",
        f"`ds-toolkit lint` knows {num_of_lint} rules, `ds-toolkit verify` {num_of_verify} about",
        f"checkpoints (DS9xx), `ds-toolkit check-script` {num_of_scripts} about scripts (DS10xx),",
        f"`ds-toolkit preflight` {num_of_hosts} about hosts (DS11xx); DS12xx are failures, which",
        "[diagnose](diagnose.md) knows.",
        "Codes are permanent. `ds-toolkit explain CODE` prints a rule's manual; `--ignore CODE` of",
        "`lint` and `check-script` leaves it out. Of the examples every *Bad* one fires exactly its own",
        "rule, and every *Good* one is clean under all of them; the tests hold that. Those of DS9xx and",
        "DS11xx are words: the tests damage real checkpoints and plant faults on hosts for them, and find",
        "exactly that code.",
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
    # A rule of no family ends this: give it one.
    families = FAMILIES_OF_FOUR_DIGITS if len(rule.code) > len("DS001") else FAMILIES
    return next(name for prefix, name in families.items() if rule.code.startswith(prefix))


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


def variables_page() -> str:
    """The variables that the linter knows as Markdown tables: those of today, then old names."""
    lines = [
        "# Variables",
        "",
        "<!-- Written by `make docs` from ds_toolkit/env/variables.py; change that. -->",
        "",
        f"The {len(VARIABLES)} variables of NCCL, torch and DeepSpeed that `ds-toolkit lint` knows. *Since*",
        "is the first version that reads the name: for NCCL as its user guide says, for torch as its",
        "releases from 2.0 on show. A dash means that it is not known, or older than that.",
        "",
        "| variable | meaning | values | since |",
        "|---|---|---|---|",
    ]
    for name, variable in sorted(VARIABLES.items()):
        values = variable.expected or "any"
        lines.append(f"| `{name}` | {variable.meaning} | {values} | {variable.since or '-'} |")
    lines += [
        "",
        "## Old names",
        "",
        "DS722 finds them. *Both set* says which counts where a file has the old name and the new one",
        "(DS729).",
        "",
        "| old name | replaced by | since | both set |",
        "|---|---|---|---|",
    ]
    for old, new in sorted(REPLACED.items()):
        lines.append(f"| `{old}` | `{new.name}` | {new.since or '-'} | {new.together} |")
    return "\n".join(lines) + "\n"


def diagnose_page() -> str:
    """What `ds-toolkit diagnose` knows as Markdown: its use, a table, and a chapter for each failure."""
    lines = [
        DIAGNOSE_HEAD,
        "## Known failures",
        "",
        "<!-- Written by `make docs` from ds_toolkit/doctor/signatures/; change those. -->",
        "",
        f"{len(SIGNATURES)} of them; `ds-toolkit explain CODE` prints also the patterns that tell one.",
        "",
        "| code | name | severity | sure |",
        "|---|---|---|---|",
    ]
    for signature in SIGNATURES:
        title = f"{signature.code} {signature.name}"
        link = f"[{signature.code}](#{_anchor(title)})"
        lines.append(
            f"| {link} | {signature.name} | {signature.severity.value} | {signature.confidence.value} |"
        )
    for signature in SIGNATURES:
        lines += ["", f"### {signature.code} {signature.name}", "", *_failure(signature)]
    return "\n".join(lines) + "\n"


def _failure(signature: Signature) -> list[str]:
    cause, fix = (
        textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
        for text in (_without_groups(signature.cause) + ".", f"*Fix*: {_without_groups(signature.fix)}.")
    )
    return [cause, "", fix]


def _without_groups(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"...", text)


if __name__ == "__main__":
    (FOLDER / "diagnose.md").write_text(diagnose_page())
    (FOLDER / "rules.md").write_text(rules_page())
    (FOLDER / "variables.md").write_text(variables_page())
