"""Which committed tags have had their time."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest


def expired(
    manifests: Iterable[Manifest], *, keep_last: int, newest: Manifest, broken: Collection[str] = ()
) -> list[str]:
    """Tags to delete after a commit, newest first.

    Args:
        manifests: of the committed tags of the directory, in any order.
        keep_last: how many unprotected tags to keep, `newest` among them; at least 1.
        newest: the commit just made, which is never deleted. Tags of later steps are left alone and not
            counted: they stem from a run that went further and was passed over at resume, and counting them
            would delete the tags that this run lives on.
        broken: tags known not to verify; left alone and not counted, since they are worth nothing.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint is never deleted")
    older = [
        manifest
        for manifest in manifests
        if manifest.step <= newest.step
        and not manifest.protected
        # Nothing resumes from it, so that it must not take the place of what something does.
        and manifest.kind != WEIGHTS_ONLY
        and manifest.tag != newest.tag
        and manifest.tag not in broken
    ]
    older.sort(key=lambda manifest: (manifest.step, manifest.created_at), reverse=True)
    num_kept = keep_last if newest.protected else keep_last - 1
    return [manifest.tag for manifest in older[num_kept:]]
