"""Which committed tags have had their time."""

from __future__ import annotations

from collections.abc import Iterable

from ds_toolkit.checkpoint.manifest import Manifest


def expired(manifests: Iterable[Manifest], *, keep_last: int, step: int) -> list[str]:
    """Tags to delete after a commit at `step`, oldest last.

    Args:
        manifests: of the whole tags of the directory, in any order.
        keep_last: how many unprotected tags up to `step` to keep; at least 1.
        step: of the commit just made. Tags of later steps are left alone and not counted: they stem from a
            run that went further and was passed over at resume, and counting them would delete the tags that
            this run lives on.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint is never deleted")
    own = [manifest for manifest in manifests if manifest.step <= step and not manifest.protected]
    own.sort(key=lambda manifest: (manifest.step, manifest.created_at), reverse=True)
    return [manifest.tag for manifest in own[keep_last:]]
