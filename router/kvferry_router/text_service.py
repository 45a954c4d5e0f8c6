"""Rendering and tokenizing in threads off the event loop: one set of tools per text bundle, whichever pods have it."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry_router import failures
from kvferry_router.output import as_api_error
from kvferry_service import logs
from kvferry_text.bundle import BundleError, TextTools, load_text
from kvferry_text.openai.parameters import Kind
from kvferry_text.openai.parse import parse_request
from kvferry_text.prepare import PreparedRequest, prepare
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import chain_hashes
from kvferry_wire.limits import Limits
from kvferry_wire.pod import TextBundle

T = TypeVar("T")

_THREADS = 2
_BUNDLES = 8  # of one service: a rollout has two
_log = logs.get_logger(__name__)

Fetch = Callable[[], Awaitable[TextBundle]]


class TextService:
    """Tools by bundle digest, and the threads that use them."""

    def __init__(self, limits: Limits, served_name: str, hash_key: bytes) -> None:
        self._limits = limits
        self._hash_key = hash_key
        self._names = (served_name,)
        self._tools: dict[str, TextTools] = {}
        self._faults: dict[str, str] = {}
        self._loading: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def digests(self) -> Collection[str]:
        """Of the bundles that are ready for use."""
        return self._tools.keys()

    def has(self, digest: str) -> bool:
        return digest in self._tools

    def tools(self, digest: str) -> TextTools | None:
        return self._tools.get(digest)

    def fault(self, digest: str) -> str:
        """Why the bundle cannot be used; empty when nothing is known against it."""
        return self._faults.get(digest, "")

    async def ensure(self, digest: str, fetch: Fetch) -> None:
        """Load a bundle unless it is loaded, is being loaded, or was found to be of no use.

        Raises whatever ``fetch`` raises: the next call tries again.
        """
        if digest in self._tools or digest in self._faults or digest in self._loading:
            return
        self._loading.add(digest)
        try:
            bundle = await fetch()
            if bundle.digested().digest != digest:
                self._refuse(digest, "the pod sent another bundle than it named")
                return
            try:
                tools = await self._run(lambda: load_text(bundle, self._limits))
            except BundleError as error:
                self._refuse(digest, str(error))
                return
            while len(self._tools) >= _BUNDLES:
                del self._tools[next(iter(self._tools))]
            self._tools[digest] = tools
            _log.info("text bundle loaded", extra=logs.fields(digest=digest[:12], vocabulary=bundle.vocab_size))
        finally:
            self._loading.discard(digest)

    async def check(self, kind: Kind, body: bytes, *, until: float) -> None:
        """Validate as far as that takes no tools. Raises ``ApiError`` as ``prepare`` does."""
        await self._run_until(lambda: parse_request(kind, body, self._limits, self._names), until)

    async def prepare(
        self,
        kind: Kind,
        body: bytes,
        tools: TextTools,
        block_sizes: Collection[int],
        extras: KeyExtras,
        *,
        contexts: Sequence[int],
        until: float,
    ) -> tuple[PreparedRequest, dict[int, list[bytes]]]:
        """Validate, render, tokenize and hash: the request, and its chained block hashes for each block size.

        Args:
            contexts: as ``prepare`` takes them.
            until: the request's deadline, on the loop's clock; it holds for the wait for a thread, too.

        Raises:
            ApiError: what the client is answered with instead; 504 at the deadline.
        """

        def work() -> tuple[PreparedRequest, dict[int, list[bytes]]]:
            made = prepare(
                kind, body, tools.bundle, tools.tokenizer, tools.template, self._limits, self._names, contexts
            )
            return made, {size: chain_hashes(self._hash_key, made.prompt_ids, size, extras) for size in block_sizes}

        return await self._run_until(work, until)

    async def _run_until(self, work: Callable[[], T], until: float) -> T:
        try:
            async with asyncio.timeout_at(until):
                return await self._run(work)
        except TimeoutError:
            raise as_api_error(failures.DEADLINE) from None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _refuse(self, digest: str, why: str) -> None:
        self._faults[digest] = why
        _log.error("a pod's text bundle cannot be used", extra=logs.fields(digest=digest[:12], reason=why))
