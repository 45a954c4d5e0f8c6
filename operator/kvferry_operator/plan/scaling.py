"""How many pods a role has: what its role object says, unless the manifest's own number has changed."""

from typing import Literal

import msgspec

from kvferry_operator.plan.manifests.meta import SEEDED, Object


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The number of pods of a role, and what is to be written to its object."""

    replicas: int
    manifest: int
    write: Literal["nothing", "create", "replicas", "seed"]  # seed: the annotation alone


def scale(manifest: int, role_object: Object | None) -> Scale:
    """Decide a role's number.

    Args:
        manifest: the number in the service's manifest.
        role_object: the role object as the API server has it, if there is one.
    """
    if role_object is None:
        return Scale(replicas=manifest, manifest=manifest, write="create")
    seeded = role_object["metadata"].get("annotations", {}).get(SEEDED)
    now = int(role_object["spec"].get("replicas", 1))
    if seeded == str(manifest):
        return Scale(replicas=now, manifest=manifest, write="nothing")
    if seeded is None or not seeded.isdigit():
        # Nobody knows whose number it is: it stays, and the manifest's next change counts again.
        return Scale(replicas=now, manifest=manifest, write="seed")
    return Scale(replicas=manifest, manifest=manifest, write="replicas")
