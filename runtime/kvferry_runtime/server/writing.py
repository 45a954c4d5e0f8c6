"""Writing an answer to a reader that may stop reading: each piece has a deadline."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvferry_wire.limits import Limits

_PIECE = 64 * 2**10  # written at once


async def write(response: web.StreamResponse, data: bytes, limits: Limits) -> None:
    """Write all of ``data``. Raises ``ConnectionResetError`` when nothing is taken for ``client_stall_s``."""
    for start in range(0, len(data), _PIECE):
        async with _stall_limit(limits):
            await response.write(data[start : start + _PIECE])


async def write_end(response: web.StreamResponse, limits: Limits) -> None:
    """Write the right end of an answer. Raises ``ConnectionResetError`` like ``write``."""
    async with _stall_limit(limits):
        await response.write_eof()


@asynccontextmanager
async def _stall_limit(limits: Limits) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limits.client_stall_s) as stall:
            yield
    except TimeoutError:
        if not stall.expired():
            raise
        raise ConnectionResetError(f"the reader has taken nothing for {limits.client_stall_s:g} s") from None
