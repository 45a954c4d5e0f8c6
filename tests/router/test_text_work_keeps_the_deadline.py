"""Rendering and tokenizing are waited for no longer than the request may take."""

import asyncio
import threading

import pytest

from kvferry_router import text_service
from kvferry_router.text_service import TextService
from kvferry_text.errors import ApiError
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.limits import Limits

from .scripted_pod import toy_tools


async def test_wait_for_a_thread_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all threads held, requests get a 504 each, and none of those that waited is worked on later."""
    free = threading.Event()
    calls: list[int] = []

    def slow(*_: object) -> None:
        calls.append(1)
        free.wait(10.0)
        raise ApiError(400, "late")

    monkeypatch.setattr(text_service, "prepare", slow)
    service = TextService(Limits(), "toy", b"x" * 32)
    until = asyncio.get_running_loop().time() + 0.1
    try:
        asked = [
            service.prepare("completion", b"{}", toy_tools(), (), KeyExtras(), contexts=(8,), until=until)
            for _ in range(6)
        ]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [error.status for error in errors if isinstance(error, ApiError)] == [504] * 6
    finally:
        free.set()
        service.close()
    assert len(calls) == 2
