"""Memory of one engine process: what is left when weights, KV and a bare torch process are taken away.

    python benchmarks/memory.py [--model DIR] [--kv-memory 128MiB] [--limit 300MiB]

Starts a pod, has it answer prompts of several lengths at once so that every buffer has been used and every KV block
touched, and reads the proportional set size (PSS) of the EngineCore process:

    rest = PSS(engine) - weights - KV - PSS(python -c "import torch")

Weights are the model's parameters times the bytes of the dtype it computes in, each parameter once. Exits with 1 when
the rest is over the limit. The peak (VmHWM, of RSS) is shown beside it: loading must not need twice the weights.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from kvferry_runtime.engine.sizing import parse_bytes
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.fetch import default_root, fetch
from kvferry_runtime.model.folder import open_folder
from kvferry_wire.layout import DTYPE_BYTES

MIB = 2**20
START_S = 600


def parameters(config: ModelConfig) -> int:
    """Number of parameters of a Llama decoder, shared embeddings once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    return config.layers * layer + embeddings + hidden


def pss(pid: int) -> int:
    """Proportional set size in bytes: shared pages count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in smaps_rollup")


def status_field(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in status")


def torch_only(threads: int) -> int:
    """PSS of a process that imports torch and has its thread pool."""
    code = f"import torch; torch.set_num_threads({threads}); torch.ones(9); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return pss(process.pid)
    finally:
        process.communicate(b"\n", timeout=60)


async def load(url: str, model: str, context: int) -> None:
    """Fill the engine's buffers: long and short prompts together, enough tokens to touch the KV blocks."""

    async def ask(client: aiohttp.ClientSession, index: int, length: int) -> None:
        ids = [(index * 7919 + position * 31) % 40_000 + 100 for position in range(length)]
        body = {"model": model, "prompt": ids, "max_tokens": 16, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    # More tokens than the default KV memory holds, so that each of its blocks has been written.
    lengths = [8, 100, 500, context // 2, context - 20, 700, 1500 % context, 64]
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(900)) as client:
        await asyncio.gather(*(ask(client, index, length) for index, length in enumerate(lengths)))


def start_pod(folder: Path, flags: list[str]) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
    ready = folder / "ready.json"
    argv = [sys.executable, "-m", "kvferry_runtime.server", "--port", "0", "--ready-file", str(ready), *flags]
    process = subprocess.Popen(argv, stderr=(folder / "log").open("wb"))
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit((folder / "log").read_text())
        time.sleep(0.1)
    content: dict[str, Any] = json.loads(ready.read_text())
    return process, content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="default: the demo model, fetched if need be")
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", default="300MiB")
    given = parser.parse_args()
    model = given.model or str(fetch("smollm2-135m-instruct", default_root(), progress=True))
    config = open_folder(model).config
    flags = ["--model", model, "--kv-memory", given.kv_memory, "--dtype", given.dtype, "--served-name", "m"]
    flags += ["--threads", str(given.threads)]
    bare = torch_only(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        process, ready = start_pod(Path(folder), flags)
        try:
            pid = int(ready["engine_pid"])
            idle = pss(pid)
            asyncio.run(load(f"http://127.0.0.1:{ready['http']}", "m", min(config.max_model_len, 2048)))
            busy, peak = pss(pid), status_field(pid, "VmHWM")
            server = pss(process.pid)
        finally:
            process.terminate()
            process.wait(30)
    weights = parameters(config) * DTYPE_BYTES[given.dtype]
    kv = parse_bytes(given.kv_memory)
    rest, limit = busy - weights - kv - bare, parse_bytes(given.limit)
    print(f"machine      {platform.processor() or platform.machine()}, {given.threads} threads")
    print(f"model        {Path(model).name}, {parameters(config) / 1e6:.1f} M parameters, {given.dtype}")
    rows = (
        ("engine", busy),
        ("- weights", weights),
        ("- KV", kv),
        ("- torch", bare),
        ("= rest", rest),
        ("limit", limit),
    )
    for name, value in rows:
        print(f"{name:<12} {value / MIB:8.1f} MiB")
    print(
        f"engine idle {idle / MIB:.1f} MiB, peak RSS {peak / MIB:.1f} MiB; API server {server / MIB:.1f} MiB (no torch)"
    )
    print("within the limit" if rest <= limit else "OVER THE LIMIT")
    return 0 if rest <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
