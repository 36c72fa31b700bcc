from __future__ import annotations

import pytest

from ds_toolkit.env.secret_names import looks_like_a_secret


@pytest.mark.parametrize(
    "name",
    [
        "MYSQL_PWD",
        "DB_PWD",
        "MY_PASS",
        "PASSPHRASE",
        "SSH_PASSPHRASE",
        "GITHUB_PAT",
        "WANDB_KEY",
        "CREDS",
        "AWS_CREDS",
        "SECRETS",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "PGPASSWORD",
        "SSHPASS",
        "REDISCLI_AUTH",
        "HFTOKEN",
        "SECRETKEY",
        "SLACK_WEBHOOK_URL",
        "AZURE_STORAGE_CONNECTION_STRING",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_like_a_secret(name)
    assert looks_like_a_secret(name.lower())
    assert looks_like_a_secret(name.title())


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "PWD",
        "OLDPWD",
        "PATH",
        "KEYBOARD",
        "PYTHONPATH",
        "BYPASS",
        "COMPAT",
    ],
)
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert not looks_like_a_secret(name)
    assert not looks_like_a_secret(name.lower())
