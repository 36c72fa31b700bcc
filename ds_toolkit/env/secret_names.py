"""Which variables hold secrets, judged by their names."""

from __future__ import annotations

import re

# PWD alone is the working folder, and numbers of tokens are no secrets.
_WORDS = re.compile(
    r"(^|_)(TOKEN|SECRETS?|API_?KEYS?|ACCESS_?KEY|CREDENTIALS?|CREDS|PRIVATE_KEY|WEBHOOK)($|_)"
    # As in libpq's PGPASSWORD, some are written in one with what they belong to.
    r"|(PASSWORDS?|PASSWD|PASSPHRASE|CONNECTION_STRING)($|_)|(SECRET|AUTH)KEY($|_)"
    r"|(^|_|SSH)PASS$|(^|_)(PAT|AUTH)$|TOKEN$|_(PWD|KEY)$",
    re.IGNORECASE,
)


def looks_like_a_secret(name: str) -> bool:
    """Whether a variable of this name, in capitals or not, is likely to hold a secret."""
    return _WORDS.search(name) is not None
