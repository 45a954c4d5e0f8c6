"""Clients that stream answers without a pause and judge each: ``python -m tests.chaos.clients``, in a namespace.

The first line of standard input is its ``Orders``; the end of standard input is the order to let the answers under way
come to their end and go. A ``Record`` is printed for each request. After a router that did not answer a client asks
another one for a while, then its own again: each has its share of the load, or its memory would tell of that.
"""

import asyncio
import json
import random
import re
import sys
from dataclasses import replace

import aiohttp
import msgspec

from kvferry_runtime.model.toy_spec import parse_toy_name
from tests.chaos.asked import Orders, Record
from tests.processes.asking import SPEC, Answer, Ask, UnclearError, judge, judge_end, make_ask, read_stream, read_whole

SLACK_S = 20.0  # over the service's deadline, for a machine that is busy and a router that is paused
AWAY_S = 10.0  # from a router that did not answer
PAUSE_S = 1.0  # after a request that was not answered, as Retry-After says
_NOTE = re.compile(r"^: kvferry (resumed|recomputed): (.*)$", re.MULTILINE)


class Client:
    """Asks one request after the other."""

    def __init__(self, number: int, orders: Orders, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        self._number, self._orders, self._session, self._stop = number, orders, session, stop
        self._spec = SPEC if orders.prompts else parse_toy_name(orders.source)
        self._source = random.Random(f"{orders.seed}/{number}")
        self._routers = sorted(orders.routers)
        self._turn, self._back_at = number, 0.0

    async def run(self) -> None:
        """Until told to stop; the last answer is read to its end."""
        number = 0
        while not self._stop.is_set():
            number += 1
            record = await self._once(number)
            print(msgspec.json.encode(record).decode(), flush=True)
            if record.silent or (record.status != 200 and not record.wrong):
                self._turn, self._back_at = self._turn + 1, record.ended + AWAY_S
            if not record.whole:
                await asyncio.sleep(PAUSE_S)

    async def _once(self, number: int) -> Record:
        ask = self._draw(f"{self._number}/{number}")
        reading = Reading(ask)
        begun = asyncio.get_running_loop().time()
        if begun >= self._back_at:
            self._turn = self._number
        router = self._routers[self._turn % len(self._routers)]
        silent = ""
        try:
            async with asyncio.timeout(self._orders.deadline_s + SLACK_S):
                await reading.read(self._session, self._orders.routers[router])
        except TimeoutError:
            silent = "hung"
        except aiohttp.ClientConnectionError:
            silent = "refused"
        record = Record(
            client=self._number,
            number=number,
            router=router,
            begun=begun,
            ended=asyncio.get_running_loop().time(),
            silent=silent,
        )
        return record if silent else finished(record, ask, reading, real=bool(self._orders.prompts))

    def _draw(self, mark: str) -> Ask:
        """A stream; one in eight is not streamed."""
        orders, source = self._orders, self._source
        if orders.prompts:
            return Ask(source.choice(orders.prompts), max_tokens=orders.max_tokens, model=orders.model)
        while True:
            ask = replace(make_ask(source, f"{orders.seed}/{mark}", self._spec), stream=source.random() < 0.875)
            if ask.max_tokens >= 40 and not ask.stop and ask.n == 1:
                ask = replace(ask, max_tokens=source.choice((64, 128, 256)))
            try:
                _ = ask.expected  # computed before its clock runs
            except UnclearError:
                continue  # a pick too close to call: another one is drawn
            return ask


class Reading:
    """One answer while it arrives."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.answer = Answer(0)
        self.body = b""
        self.times: list[float] = []  # of pieces of text

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send the request and read what comes, however it ends. Raises only when no answer began."""
        clock = asyncio.get_running_loop().time
        async with session.post(url + "/v1/completions", json=self._ask.body()) as response:
            self.answer = Answer(response.status, response.headers.get("x-kvferry-path", ""))
            self.answer.texts, self.answer.finish = [""] * self._ask.n, [None] * self._ask.n
            try:
                async for part in response.content.iter_any():
                    self.body += part
                    if b"data: " in part:
                        self.times.append(clock())
            except aiohttp.ClientPayloadError:
                self.answer.broken = True

    def take(self) -> None:
        """Read the whole of what came. Raises ``AssertionError`` for what is no answer at all."""
        if self.answer.status == 200 and self._ask.stream:
            read_stream(self.answer, self.body)
        elif not self.answer.broken:
            read_whole(self.answer, json.loads(self.body))


def finished(record: Record, ask: Ask, reading: Reading, *, real: bool) -> Record:
    """The record of an answer that began, judged. A real model's text is judged later, its form now."""
    answer = reading.answer
    wrong = ""
    try:
        reading.take()
        judge_end(ask, answer, router_died=True) if real else judge(ask, answer, router_died=True)
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        wrong = str(error) or repr(error)
    notes = dict(_NOTE.findall(reading.body.decode("utf-8", "replace")))
    gaps = [late - early for early, late in zip(reading.times, reading.times[1:], strict=False)]
    error = answer.error or {}
    return msgspec.structs.replace(
        record,
        status=answer.status,
        path=answer.path,
        whole=answer.ok and not wrong,
        error=str(error.get("code") or error.get("type") or "") if error else "",
        silent="" if answer.ok or answer.error is not None or wrong else "cut",
        wrong=wrong[:3000],
        done=answer.done,
        resumed=tuple(notes.get("resumed", "").split(", ")) if "resumed" in notes else (),
        recomputed=notes.get("recomputed", ""),
        first_s=reading.times[0] - record.begun if reading.times else 0.0,
        gap_s=max(gaps, default=0.0),
        pieces=len(reading.times),
        prompt=ask.prompt if real else "",
        text=answer.texts[0] if real and answer.texts else "",
    )


async def main() -> None:
    """See the module."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = msgspec.json.decode(await reader.readline(), type=Orders)
    stop = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=orders.deadline_s)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(orders.clients):
            group.create_task(Client(number, orders, session, stop).run())
        await reader.read()
        stop.set()


if __name__ == "__main__":
    asyncio.run(main())
