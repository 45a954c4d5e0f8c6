"""How long a stream stands still when its decode pod is killed, and whether anything of it is lost.

    python benchmarks/resume.py [--streams 32] [--tokens 400] [--rounds 3] [--fault kill|stop|engine] [--model SOURCE]

Starts one prefill and two decode pods by `kvferry up`, lets the streams run, and kills the decode pod that has more of
them (``stop``: SIGSTOP, which only the stall timeout notices; ``engine``: its EngineCore alone). Measured at the
client, for each stream that was resumed: the longest time between two of its events. Beside it, in the same run, the
same of the streams on the pod that lived: what the machine and the others' prompts cost them.

On the toy model every text is compared with the oracle's; with another model, with what the same service says to the
same prompts undisturbed. It computes in float32, where our C++ operators give a token the same bits in any batch; with
torch's, near ties may go either way, and a text that differs is to be looked at.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvferry_cli.local.state_dir import PodRecord, StateDir
from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_runtime.model.toy_spec import ToySpec

START_S = 180.0
TARGET_S = 3.0
MARK = ": kvferry resumed"


@dataclass
class Stream:
    """One answer: its text, when its events came, and whether it was resumed."""

    prompt: str
    text: str = ""
    times: list[float] = field(default_factory=list)
    resumed: bool = False
    whole: bool = False

    @property
    def gap_s(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


async def read(session: aiohttp.ClientSession, url: str, stream: Stream, tokens: int) -> None:
    body = {"model": "m", "prompt": stream.prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {await response.text()}")
        async for raw in response.content:
            line = raw.decode().strip()
            if line.startswith(MARK):
                stream.resumed = True
            elif line == "data: [DONE]":
                stream.whole = True
            elif line.startswith("data: "):
                document = json.loads(line.removeprefix("data: "))
                if "error" in document:
                    raise SystemExit(f"a stream failed: {document}")
                stream.times.append(time.perf_counter())
                stream.text += "".join(choice["text"] for choice in document["choices"])


class Service:
    """`kvferry up` in a folder of its own."""

    def __init__(self, folder: Path, model: str) -> None:
        self._state = StateDir(folder / "state")
        spec: dict[str, Any] = {
            "model": {"name": "m", "source": model},
            "engine": {"dtype": "float32", "kvBlocks": 3000, "maxModelLen": 1024, "maxRunning": 64, "threads": 1},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 2},
            "router": {"auth": "none", "disaggregation": {"minUncachedTokens": 32}},
        }
        manifest = {"apiVersion": "serving.kvferry.dev/v1alpha1", "kind": "InferenceService"}
        path = folder / "service.yaml"
        path.write_text(json.dumps(manifest | {"metadata": {"name": "resume"}, "spec": spec}))  # JSON is YAML
        self._log = (folder / "log").open("wb")
        argv = [
            sys.executable,
            "-m",
            "kvferry_cli",
            "up",
            str(path),
            "--port",
            "0",
            "--state-dir",
            str(folder / "state"),
        ]
        self._process = subprocess.Popen(argv, stdout=self._log, stderr=self._log)

    async def ready(self, session: aiohttp.ClientSession) -> str:
        """Until all three pods are used by the router; its URL."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            record = self._state.read_state()
            if record is not None and record.state == "ready":
                url = f"http://127.0.0.1:{self._pod('router').ports['http']}"
                if await self._usable(session, url) == 3:
                    return url
            await asyncio.sleep(0.1)
        raise SystemExit("the service did not become ready")

    @staticmethod
    async def _usable(session: aiohttp.ClientSession, url: str) -> float:
        try:
            async with session.get(url + "/metrics") as response:
                lines = (await response.text()).splitlines()
        except aiohttp.ClientError:
            return 0
        wanted = [line for line in lines if line.startswith("kvferry:router_pods{") and 'state="ready"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    def _pod(self, name: str) -> PodRecord:
        record = self._state.read_state()
        assert record is not None
        return next(pod for pod in record.pods if pod.name == name)

    async def busier(self, session: aiohttp.ClientSession) -> str:
        """The decode pod with more legs."""
        legs = {}
        for name in ("decode-0", "decode-1"):
            async with session.get(f"http://127.0.0.1:{self._pod(name).ports['http']}/metrics") as response:
                found = [line for line in (await response.text()).splitlines() if line.startswith("kvferry:legs ")]
            legs[name] = float(found[0].split()[1])
        return max(legs, key=lambda name: legs[name])

    def harm(self, name: str, fault: str) -> int:
        """Returns the pid that got the signal."""
        process = self._pod(name).process
        found = None if process is None else process.process()
        if found is None:
            raise SystemExit(f"{name} does not run")
        target = found.children()[0] if fault == "engine" else found
        os.kill(target.pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        return target.pid

    def close(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        self._process.wait(60)
        for process in psutil.wait_procs(family, 5)[1]:
            process.kill()
        self._log.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(1000 * share * len(ranked)) // 1000) - 1))]


def make_prompts(count: int, number: int) -> list[str]:
    return [f"Round {number}, stream {each}: a prompt that is long enough to be ferried." for each in range(count)]


async def streams(service: Service, prompts: list[str], tokens: int, fault: str) -> list[Stream]:
    """All at once; with a fault, in their midst."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        url = await service.ready(session)
        found = [Stream(prompt) for prompt in prompts]
        tasks = [asyncio.create_task(read(session, url, stream, tokens)) for stream in found]
        pid = 0
        if fault:
            while any(len(stream.times) < tokens // 5 for stream in found):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)
            pid = service.harm(await service.busier(session), fault)
        try:
            await asyncio.gather(*tasks)
        finally:
            if fault == "stop":
                with contextlib.suppress(ProcessLookupError):  # it may have been replaced, as a pod that is not live is
                    os.kill(pid, signal.SIGCONT)
    return found


def expected(prompts: list[str], tokens: int) -> list[str]:
    """What the toy says."""
    spec = ToySpec()
    return ["".join(map(chr, toy_next_tokens(list(prompt.encode()), tokens, spec))) for prompt in prompts]


async def measure(arguments: argparse.Namespace) -> int:
    toy = arguments.model.startswith("toy")
    gaps: list[float] = []
    others: list[float] = []
    different = cut = 0
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), arguments.model)
        try:
            for number in range(arguments.rounds):
                prompts = make_prompts(arguments.streams, number)
                if toy:
                    right = expected(prompts, arguments.tokens)
                else:
                    right = [each.text for each in await streams(service, prompts, arguments.tokens, "")]
                found = await streams(service, prompts, arguments.tokens, arguments.fault)
                gaps += [stream.gap_s for stream in found if stream.resumed]
                others += [stream.gap_s for stream in found if not stream.resumed]
                different += sum(stream.text != text for stream, text in zip(found, right, strict=True))
                cut += sum(not stream.whole for stream in found)
        finally:
            service.close()
    report(arguments, gaps, others, different, cut)
    return 1 if not gaps or cut or different else 0


def report(arguments: argparse.Namespace, gaps: list[float], others: list[float], different: int, cut: int) -> None:
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f}")
    print(f"python benchmarks/resume.py {' '.join(sys.argv[1:])}")
    count = arguments.streams * arguments.rounds
    print(
        f"{count} streams, {len(gaps)} of them resumed after {arguments.fault}; {cut} cut, {different} with other text"
    )
    for name, values in (("resumed", gaps), ("on the pod that lived", others)):
        if values:
            row = " ".join(f"{label} {quantile(values, share):.3f}" for label, share in (("p50", 0.5), ("p99", 0.99)))
            print(f"longest pause of streams {name}, s: {row} max {max(values):.3f}")
    if gaps and arguments.fault != "stop":
        verdict = "reached" if quantile(gaps, 0.99) <= TARGET_S else "not reached"
        print(f"target: p99 of the resumed <= {TARGET_S:g} s: {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fault", choices=("kill", "stop", "engine"), default="kill")
    parser.add_argument("--model", default="toy:step_ms=10", help="a model source as in a manifest")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
