"""Secrets in quoted lines: values of names that look like secrets, and tokens known by their form."""

from __future__ import annotations

import re

from ds_toolkit.env.secret_names import looks_like_a_secret

MASK = "***"
# NAME=value, "name": "value", --name value; of a quoted value all up to the closing quote.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>[A-Za-z][A-Za-z0-9_-]*)(?P<between>[\"']?\s*[=:]\s*|\s+(?=[\"']))"
    r"(?P<value>\"[^\"]*\"?|'[^']*'?|(?:Bearer|Basic)\s+\S+|[^\s,;\"'})\]]+)"
)
_OPTION = re.compile(r"--(?P<name>[A-Za-z][A-Za-z0-9_-]*)(?P<between>[\"']?,?\s+[\"']?)(?P<value>[^\s\"',]+)")
# Of Hugging Face, GitHub, OpenAI, AWS, Slack, Google; a password in a URL.
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{30,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def masked(text: str) -> str:
    """The text without secrets: what a name that looks like one is set to, and tokens known by their form."""
    text = _NAMED.sub(_masked_value, text)
    text = _OPTION.sub(_masked_value, text)
    return _FORMS.sub(MASK, text)


def _masked_value(match: re.Match[str]) -> str:
    if not looks_like_a_secret(match["name"].replace("-", "_")):
        return match[0]
    return match[0][: match.start("value") - match.start()] + MASK
