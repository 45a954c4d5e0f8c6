"""Files that are made to fill memory or time by what surrounds the weights: refused, whatever their size."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint

MIB = 2**20
SECONDS = 30.0  # for all of them; each takes a moment
REFUSED_MIB = 48  # beyond an interpreter that has read a whole model: nothing that grows with the bomb
PARSED_MIB = 320  # for the largest header that is read to its end before it is found wrong

# Opens models one after the other; tells what was said of each and how far memory rose meanwhile.
PROBE = """
import json, sys, time
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.text import load_text_bundle
def line(name):
    return next(int(one.split()[1]) for one in open("/proc/self/status") if one.startswith(name)) * 1024
load_text_bundle(open_folder(sys.argv[1]))
for path in sys.argv[2:]:
    open("/proc/self/clear_refs", "w").write("5")
    before, began = line("VmRSS"), time.monotonic()
    try:
        load_text_bundle(open_folder(path))
        said = ""
    except ModelError as error:
        said = str(error)
    print(json.dumps([said, line("VmHWM") - before, time.monotonic() - began]), flush=True)
"""


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def sparse(path: Path, size: int, head: bytes = b"") -> None:
    """A file of a size that nobody has to store."""
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(size)


def weights(content: bytes, size: int = 0) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_checkpoint(folder)
        sparse(folder / "model.safetensors", max(size, len(content)), content)
        return folder

    return make


def beside(name: str) -> Callable[[Path], Path]:
    """A file that is read whole, of 8 GiB."""

    def make(folder: Path) -> Path:
        make_checkpoint(folder, shards=2 if "index" in name else 1)
        sparse(folder / name, 8 * 2**30)
        return folder

    return make


def gguf_key(kind: int, value: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + value
        sparse(folder / "model.gguf", 8 * 2**30, head)
        return folder

    return make


def many_keys(count: int) -> bytes:
    """Names without end, the last one twice."""
    return b"{" + b",".join(b'"%d":0' % number for number in (*range(count), count - 1)) + b"}"


TERABYTE = b'{"a":{"dtype":"F32","shape":[274877906944],"data_offsets":[0,1099511627776]}}'
BOMBS: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "a tensor of 1 TB": (weights(header(TERABYTE)), "the file has only", REFUSED_MIB),
    "a header of 1 TB": (weights(struct.pack("<Q", 2**40) + b"{}"), "truncated", REFUSED_MIB),
    "a header of 4 GiB": (weights(struct.pack("<Q", 2**32), 8 * 2**30), "at most 16777216 are accepted", REFUSED_MIB),
    "lists without end": (weights(header(b"[" + b"[]," * (5 * MIB) + b"0]")), "values; at most", REFUSED_MIB),
    "names without end": (weights(header(many_keys(1_000_000))), "appears twice", PARSED_MIB),
    "tensors without end": (
        weights(header(b"{" + b",".join(b'"%d":{"a":[]}' % number for number in range(300_000)) + b"}")),
        "dtype None; accepted: F32, F16, BF16",
        PARSED_MIB,
    ),
    **{
        f"8 GiB of {name}": (beside(name), "at most", REFUSED_MIB)
        for name in (
            "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
            "model.safetensors.index.json",
        )
    },
    "an array of 7 G numbers": (gguf_key(9, struct.pack("<IQ", 0, 7 * 2**30)), "entries of arrays", REFUSED_MIB),
    "an array of 500 M texts": (gguf_key(9, struct.pack("<IQ", 8, 500 * MIB)), "entries of arrays", REFUSED_MIB),
    "a text of 4 GiB": (gguf_key(8, struct.pack("<Q", 2**32)), "longer than 67108864 bytes", REFUSED_MIB),
}  # fmt: skip


def test_each_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    """Its size and the number of its values are looked at first. A model that is whole is read beside them."""
    good = make_checkpoint(tmp_path / "good")
    paths = [make(tmp_path / str(number)) for number, (make, *_) in enumerate(BOMBS.values())]
    command = [sys.executable, "-c", PROBE, str(good), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [
        (name, said, f"{rose // MIB} MiB")
        for (name, (_, expected, most)), (said, rose, _) in zip(BOMBS.items(), told, strict=True)
        if expected not in said or rose > most * MIB
    ]
    assert not wrong
    assert sum(took for *_, took in told) < SECONDS


@pytest.mark.parametrize("size", [16 * MIB, 16 * MIB + 1])
def test_the_bound_of_a_header_is_what_it_says(tmp_path: Path, size: int) -> None:
    """Spaces are allowed behind a header: at the bound it is read, one byte beyond it is not."""
    from kvferry_runtime.model.errors import ModelError
    from kvferry_runtime.model.safetensors_file import read_header

    path = tmp_path / "model.safetensors"
    path.write_bytes(header(b"{}" + b" " * (size - 2)))
    if size == 16 * MIB:
        assert read_header(path).tensors == {}
    else:
        with pytest.raises(ModelError, match="a header of 16777217 bytes; at most 16777216"):
            read_header(path)
