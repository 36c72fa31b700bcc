"""Which committed tags have had their time."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ds_toolkit.checkpoint.manifest import WEIGHTS_ONLY, Manifest


def expired(
    manifests: Iterable[Manifest],
    *,
    keep_last: int,
    newest: Manifest,
    broken: Collection[str] = (),
    keep_every: int | None = None,
) -> list[str]:
    """Tags to delete after a commit, newest first.

    Args:
        manifests: of the committed tags of the directory, in any order.
        keep_last: how many unprotected tags to keep, `newest` among them; at least 1.
        newest: the commit just made, which is never deleted. Tags of later steps are left alone and not
            counted: they stem from a run that went further and was passed over at resume, and counting them
            would delete the tags that this run lives on.
        broken: tags known not to verify; left alone and not counted, since they are worth nothing.
        keep_every: tags of the multiples of so many steps are kept for ever and not counted, as protected
            ones are; None for no such wish.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint is never deleted")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is {keep_every}; it counts steps, 1 or more")

    def is_kept_for_ever(manifest: Manifest) -> bool:
        return manifest.protected or (keep_every is not None and manifest.step % keep_every == 0)

    older = [
        manifest
        for manifest in manifests
        if manifest.step <= newest.step
        and not is_kept_for_ever(manifest)
        # Nothing resumes from it, so that it must not take the place of what something does.
        and manifest.kind != WEIGHTS_ONLY
        and manifest.tag != newest.tag
        and manifest.tag not in broken
    ]
    older.sort(key=lambda manifest: (manifest.step, manifest.created_at), reverse=True)
    num_kept = keep_last if is_kept_for_ever(newest) else keep_last - 1
    return [manifest.tag for manifest in older[num_kept:]]
