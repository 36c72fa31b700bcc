"""All rules of all rooms, by code and by name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ds_toolkit.errors import ToolkitError
from ds_toolkit.rules import Problem, Rule, number_of


@functools.cache
def rules_of_files() -> dict[str, Rule[Any]]:
    """What `lint` can find in a single file, by code; quick to import."""
    from ds_toolkit.config.rules import RULES as CONFIG_RULES
    from ds_toolkit.env import rules as _  # noqa: F401  (registers them)
    from ds_toolkit.env.hostfile_rules import RULES as HOSTFILE_RULES
    from ds_toolkit.env.target import RULES as ENV_RULES

    return {rule.code: rule for registry in (CONFIG_RULES, ENV_RULES, HOSTFILE_RULES) for rule in registry}


def rule_of(code: str) -> Rule[Any]:
    """The rule of a code; no more rooms are imported for it than need be."""
    if code.startswith("DS9"):
        return rules_of_checkpoints()[code]
    if len(code) > len("DS001"):
        # By the first two of four digits.
        families = {"DS10": rules_of_scripts, "DS11": rules_of_hosts, "DS12": known_failures}
        return families[code[:4]]()[code]
    from ds_toolkit.config.rules import RULES as CONFIG_RULES

    if code in CONFIG_RULES:
        return CONFIG_RULES[code]
    files = rules_of_files()
    return (files if code in files else all_rules())[code]


@functools.cache
def all_rules() -> dict[str, Rule[Any]]:
    """Every rule that the toolkit has, by its code, in the order of the codes."""
    from ds_toolkit.advise.rules import RULES as PLAN_RULES

    others = {rule.code: rule for rule in PLAN_RULES}
    found = {**rules_of_files(), **others, **rules_of_checkpoints(), **rules_of_scripts(), **rules_of_hosts()}
    return {code: found[code] for code in sorted(found, key=number_of)}


@functools.cache
def rules_of_scripts() -> dict[str, Rule[Any]]:
    """What `check-script` can find, by code."""
    from ds_toolkit.doctor.scripts.rules import RULES as SCRIPT_RULES

    return {rule.code: rule for rule in SCRIPT_RULES}


@functools.cache
def rules_of_hosts() -> dict[str, Rule[Any]]:
    """What `preflight` can find, by code."""
    from ds_toolkit.doctor.preflight.judging import RULES as HOST_RULES

    return {rule.code: rule for rule in HOST_RULES}


@functools.cache
def rules_of_checkpoints() -> dict[str, Rule[Any]]:
    """What `verify` can find, by code."""
    from ds_toolkit.checkpoint import examination as _  # noqa: F401  (registers them)
    from ds_toolkit.checkpoint.examining.directory_rules import DIRECTORY_RULES
    from ds_toolkit.checkpoint.examining.examined import TAG_RULES

    return {rule.code: rule for registry in (TAG_RULES, DIRECTORY_RULES) for rule in registry}


@functools.cache
def known_failures() -> dict[str, Rule[Any]]:
    """What `diagnose` can find, by code; signatures in the form of rules, with a manual each."""
    from ds_toolkit.doctor.signatures import SIGNATURES

    return {
        signature.code: Rule(
            signature.code, signature.name, signature.severity, _with_manual(signature.manual)
        )
        for signature in SIGNATURES
    }


def _with_manual(manual: str) -> Callable[[Any], Iterator[Problem]]:
    def check(_: Any) -> Iterator[Problem]:
        # Signatures are compared with logs by the doctor, all at once.
        yield from ()

    check.__doc__ = manual
    return check


def rule_named(word: str) -> Rule[Any]:
    """The rule with this code, or with this name.

    Raises:
        ToolkitError: there is none; it names the nearest.
    """
    rules = {**all_rules(), **known_failures()}
    by_word = {**rules, **{rule.name: rule for rule in rules.values()}}
    for candidate in (word, word.upper(), word.lower().replace("_", "-")):
        if candidate in by_word:
            return by_word[candidate]
    near = difflib.get_close_matches(word.upper() if word[:2].upper() == "DS" else word.lower(), by_word, n=1)
    fix = f"did you mean `{near[0]}`?" if near else "codes are DS and three or four digits"
    raise ToolkitError(f"there is no rule `{word}`", fix=fix)
