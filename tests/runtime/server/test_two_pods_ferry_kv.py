"""Prefill on one pod, decode on another: the exact tokens, and nothing left on either."""

from collections.abc import Iterator

import msgspec
import pytest

from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_wire.frames import End, Prefilled, Tokens
from kvferry_wire.leg import ChoiceState
from tests.runtime.server.harness import PodProcess, frames, freed_within, make_leg, running_pod

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PodProcess, PodProcess]]:
    """(prefill, decode) with the same keys."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        running_pod(folder / "p", "--role", "prefill", "--lease", "3") as prefill,
        running_pod(folder / "d", "--role", "decode", "--lease", "3", keys=prefill.keys) as decode,
    ):
        yield prefill, decode


@pytest.mark.parametrize(("length", "n"), [(5, 1), (16, 1), (300, 1), (100, 3)])
async def test_the_answer_is_the_oracles(pods: tuple[PodProcess, PodProcess], length: int, n: int) -> None:
    """Partial, exact and many blocks, one and more choices; the decode pod computed none of the prompt."""
    leg = make_leg(f"leg-{length}-{n}", prompt="".join(chr(65 + i % 26) for i in range(length)), n=n)
    expected = toy_next_tokens(leg.prompt_ids, 16)
    async with pods[0].client() as prefill, pods[1].client() as decode:
        prefilled = (await frames(prefill, "prefill", leg))[-1]
        assert isinstance(prefilled, Prefilled)
        assert prefilled.first == (expected[0],) * n
        second = msgspec.structs.replace(
            leg,
            handle=prefilled.handle,
            choices=tuple(ChoiceState(emitted=(first,)) for first in prefilled.first),
            cached_tokens=prefilled.cached_tokens,
            attempt=1,
        )
        got = await frames(decode, "generate", second)
        opening = got[0]
        assert isinstance(opening, Tokens)
        assert opening.ids == ()  # text of the first token, before any engine output
        assert opening.chars == 1
        for choice in range(n):
            ids = [i for frame in got if isinstance(frame, Tokens) and frame.choice == choice for i in frame.ids]
            assert ids == expected[1:]
        end = got[-1]
        assert isinstance(end, End)
        assert (end.recomputed, end.completion_tokens) == ("", 16 * n)
        await freed_within(prefill, 1.0)
        await freed_within(decode, 1.0)


async def test_a_changed_handle_is_recomputed_with_the_right_answer(pods: tuple[PodProcess, PodProcess]) -> None:
    """A handle whose MAC does not fit is not followed; the reason is in the end."""
    leg = make_leg("forged", prompt="forged prompt " * 3)
    expected = toy_next_tokens(leg.prompt_ids, 16)
    async with pods[0].client() as prefill, pods[1].client() as decode:
        prefilled = (await frames(prefill, "prefill", leg))[-1]
        assert isinstance(prefilled, Prefilled)
        assert prefilled.handle is not None
        forged = msgspec.structs.replace(prefilled.handle, control_port=1)
        second = msgspec.structs.replace(leg, handle=forged, choices=(ChoiceState(emitted=prefilled.first),), attempt=1)
        got = await frames(decode, "generate", second)
        assert [i for frame in got if isinstance(frame, Tokens) for i in frame.ids] == expected[1:]
        end = got[-1]
        assert isinstance(end, End)
        assert end.recomputed == "mac"
        assert b"mac" in end.data
        await freed_within(prefill, 5.0)  # nobody gave the lease up: it ends by its time
        await freed_within(decode, 1.0)


async def test_a_stop_string_in_the_first_token_gives_the_lease_up(pods: tuple[PodProcess, PodProcess]) -> None:
    """Decode finds that nothing is to be computed: the answer ends at once and prefill's blocks are free."""
    leg = make_leg("stopped", prompt="stopped at once " * 2)
    (first,) = toy_next_tokens(leg.prompt_ids, 1)
    leg = make_leg("stopped", prompt="stopped at once " * 2, sampling={"max_tokens": 50, "stop": (chr(first),)})
    async with pods[0].client() as prefill, pods[1].client() as decode:
        prefilled = (await frames(prefill, "prefill", leg))[-1]
        assert isinstance(prefilled, Prefilled)
        assert prefilled.handle is not None
        second = msgspec.structs.replace(
            leg, handle=prefilled.handle, choices=(ChoiceState(emitted=(first,)),), attempt=1
        )
        (end,) = await frames(decode, "generate", second)
        assert isinstance(end, End)
        assert (end.finish, end.completion_tokens) == (("stop",), 1)
        await freed_within(prefill, 1.0)
        await freed_within(decode, 1.0)
