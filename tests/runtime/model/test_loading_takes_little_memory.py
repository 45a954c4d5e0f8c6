"""Loading a model takes the memory of its weights and little more, at its peak too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvferry_runtime.layers.embedding import TWICE_BYTES
from kvferry_runtime.layers.kernels import choose_kernels
from kvferry_runtime.layers.linear import LinearKind
from kvferry_runtime.model.folder import open_folder

MIB = 2**20
SLACK = 150 * MIB  # the largest tensor in two forms, and what torch allocates at first use

PROBE = """
import json, sys
import psutil, torch
import numpy, gguf
from kvferry_runtime.model import loader
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = psutil.Process().memory_info().rss
if sys.argv[2] != "native":
    loader.choose_linear = lambda *_: (sys.argv[2], "test")
model = loader.load_model(sys.argv[1], "float32")
print(json.dumps([psutil.Process().memory_info().rss - before, peak() - before]))
"""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transposed", "packed", "native"])
def test_loading_a_gguf_model_peaks_near_its_weights(kind: LinearKind, demo_model: Path) -> None:
    """Each tensor is dequantized, brought into its form and given up before the next is read.

    The tied embedding of a small model is kept twice, but for the C++ operators.
    """
    env = {**os.environ, "KVFERRY_KERNELS": "native" if kind == "native" else "torch"}
    if kind == "native" and choose_kernels(torch.float32, env={}).library is None:
        pytest.skip(choose_kernels(torch.float32, env={}).reason)
    command = [sys.executable, "-c", PROBE, str(demo_model), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    after, peak = json.loads(done.stdout)
    config = open_folder(demo_model).config
    attention = (config.heads + config.kv_heads) * config.head_dim * 2
    per_layer = config.hidden_size * (attention + 3 * config.intermediate_size + 2)
    weights = 4 * (config.vocab_size * config.hidden_size + config.layers * per_layer + config.hidden_size)
    embedding = 4 * config.vocab_size * config.hidden_size
    twice = embedding if embedding <= TWICE_BYTES and kind != "native" else 0
    assert after < weights + twice + SLACK
    assert peak < weights + twice + SLACK
