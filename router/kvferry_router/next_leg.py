"""The next leg of a request: its first one, with what has come of the answer since. Pure."""

from collections.abc import Sequence

import msgspec

from kvferry_router.answer import Answer
from kvferry_wire.handle import KVHandle
from kvferry_wire.leg import Leg


def next_leg(first: Leg, answer: Answer, *, attempt: int, left_s: float, compat_hash: str) -> Leg:
    """A prefill leg, or what a decode leg has in common with one. ``left_s``: seconds until its deadline."""
    return msgspec.structs.replace(
        first,
        attempt=attempt,
        deadline_ms=max(1, int(1000 * left_s)),
        choices=answer.given.states(),
        cached_tokens=answer.cached_tokens,
        format=msgspec.structs.replace(first.format, role_sent=answer.sent),
        compat_hash=compat_hash,
        attached=True,
    )


def decode_leg(leg: Leg, answer: Answer, handle: KVHandle | None, *, must_pull: bool, lost: Sequence[str]) -> Leg:
    """The same for decode. ``lost``: how earlier decode legs ended, which had begun the answer."""
    return msgspec.structs.replace(
        leg, handle=handle, must_pull=must_pull, recompute=answer.recompute, resumed=", ".join(lost)
    )
