"""Legs sent straight to the pods of a service, as its router sends them."""

import aiohttp
import msgspec

from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Frame, FrameDecoder, Prefilled, Tokens
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg, Sampling
from tests.support.service import Pod, Service

PROMPT = "A prompt of several blocks that is ferried from one engine to the other. "


def make_leg(
    internal_id: str,
    prompt_ids: tuple[int, ...] | None = None,
    *,
    model: str = "toy",
    max_tokens: int = 16,
    attempt: int = 0,
    deadline_ms: int = 30_000,
) -> Leg:
    """A greedy leg; without ids, over a prompt of its own. ``internal_id`` must be new in the service."""
    return Leg(
        internal_id=internal_id,
        attempt=attempt,
        request_id="req-1",
        deadline_ms=deadline_ms,
        prompt_ids=tuple(f"{internal_id}: {PROMPT}".encode()) if prompt_ids is None else prompt_ids,
        choices=(ChoiceState(),),
        sampling=Sampling(seed=1, max_tokens=max_tokens, temperature=0.0),
        format=AnswerFormat(
            kind="completion", stream=True, include_usage=True, response_id="cmpl-1", created=1, model=model
        ),
        extras=KeyExtras(),
    )


def decode_leg(leg: Leg, prefilled: Prefilled) -> Leg:
    """The decode leg that follows a prefill answer."""
    return msgspec.structs.replace(
        leg,
        attempt=leg.attempt + 1,
        handle=prefilled.handle,
        choices=tuple(ChoiceState(emitted=(first,)) for first in prefilled.first),
        cached_tokens=prefilled.cached_tokens,
    )


async def frames(service: Service, session: aiohttp.ClientSession, pod: Pod, leg: Leg) -> list[Frame]:
    """Send a leg to a prefill or decode pod; all its frames."""
    kind = "prefill" if pod.startswith("prefill") else "generate"
    decoder = FrameDecoder()
    found: list[Frame] = []
    url = f"{service.url(pod)}/internal/v1/{kind}"
    async with session.post(url, data=msgspec.msgpack.encode(leg)) as response:
        assert response.status == 200, await response.text()
        async for part in response.content.iter_any():
            found += decoder.feed(part)
    assert decoder.pending_bytes == 0
    return found


def ids_of(found: list[Frame], choice: int = 0) -> list[int]:
    """All ids that a leg's frames name, the opening's aside (it repeats none)."""
    return [token for frame in found if isinstance(frame, Tokens) and frame.choice == choice for token in frame.ids]
