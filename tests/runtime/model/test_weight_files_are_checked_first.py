"""A file that is cut, lies about itself or is of another kind is refused by name, before memory is taken for it."""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.gguf_file import read_gguf
from kvferry_runtime.model.loader import load_model
from kvferry_runtime.model.safetensors_file import read_header
from kvferry_runtime.model.weights_gguf import GGUFWeights
from kvferry_runtime.model.weights_safetensors import SafetensorsWeights
from tests.support.checkpoints import TinyLlama, make_checkpoint, make_gguf


@pytest.fixture(autouse=True)
def no_tensor_is_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come from headers alone."""
    if "reads_tensors" in request.node.name:
        return

    def fail(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsWeights, "read", fail)
    monkeypatch.setattr(GGUFWeights, "read", fail)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace a safetensors file's JSON header, the data behind it unchanged."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode() if not isinstance(changed, bytes) else changed
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


NORM = "model.norm.weight"


def a_terabyte(header: dict[str, Any]) -> None:
    header[NORM] = {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}


def overlapping(header: dict[str, Any]) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [begin - 8, end - 8]


def other_size(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [41]


def negative(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = [-168, 0]


def reversed_offsets(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = header[NORM]["data_offsets"][::-1]


def eight_bit(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "F8_E4M3"


def booleans(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [True]


def no_object(header: dict[str, Any]) -> None:
    header[NORM] = 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (a_terabyte, f"{NORM}: ends at byte 1099511.*, but the file has only"),
        (overlapping, f"{NORM}: its place"),
        (other_size, f"{NORM}: shape .* takes 164 bytes, data_offsets say 168"),
        (negative, f"{NORM}: data_offsets"),
        (reversed_offsets, f"{NORM}: data_offsets"),
        (eight_bit, f"{NORM}: dtype 'F8_E4M3'; accepted: F32, F16, BF16"),
        (booleans, f"{NORM}: shape"),
        (no_object, f"{NORM}: its entry"),
        (lambda _: [1], "no JSON object"),
        (lambda _: b'{"a": {}, "a": {}}', "'a' appears twice"),
        (lambda _: b"[" * 100_000, "not JSON"),
        (lambda _: b"\xff{}", "not JSON"),
    ],
)
def test_a_lying_safetensors_header_is_refused(change: Callable[..., Any], said: str, tmp_path: Path) -> None:
    """The header must describe exactly this file, tensor by tensor."""
    path = make_checkpoint(tmp_path)
    rewrite_header(path / "model.safetensors", change)
    with pytest.raises(ModelError, match=said):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_cut_safetensors_file_is_refused(keep: int, tmp_path: Path) -> None:
    """Wherever it was cut."""
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load_model(tmp_path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    """A file longer than its header says is not what was saved."""
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="its header is wrong"):
        load_model(tmp_path)


def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    """Nothing is read for a header that cannot be there."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ModelError, match="a header of 9223372036854775808 bytes in a file of 10"):
        read_header(path)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(NORM), f"{NORM}: not in the file"),
        (lambda w: w.update({"model.layers.9.bias": torch.zeros(1)}), r"model\.layers\.9\.bias: the model's config"),
        (lambda w: w.update({NORM: torch.zeros(41)}), rf"{NORM}: shape \[41\] in model\.safetensors; \[42\]"),
        (lambda w: w.update({NORM: torch.zeros(6, 7)}), rf"{NORM}: shape \[6, 7\]"),
        (lambda w: [w.pop(name) for name in list(w)[1:]], "and 14 more tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(change: Callable[..., Any], said: str, tmp_path: Path) -> None:
    """Missing, unknown and mis-shaped tensors, with what is accepted."""
    change_weights(make_checkpoint(tmp_path), change)
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path)


def test_known_leftovers_are_ignored_reads_tensors(tmp_path: Path) -> None:
    """Rotary buffers of old checkpoints, and a second copy of a tied output layer, are not read."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
        weights["lm_head.weight"] = torch.zeros(263, 42)

    change_weights(make_checkpoint(tmp_path), add)
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": {NORM: "../model.safetensors"}}, r"weight_map\['model.norm.weight'\] is '\.\./"),
        ({"weight_map": {NORM: "/etc/passwd"}}, "in this folder"),
        ({"weight_map": {NORM: "model.bin"}}, "in this folder"),
        ({"weight_map": {NORM: "absent.safetensors"}}, r"absent\.safetensors: named by"),
        ({"weight_map": [1]}, "weight_map"),
    ],
)
def test_a_wrong_index_is_refused(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    """An index names files of its own folder that are there."""
    path = make_checkpoint(tmp_path, shards=2)
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=said):
        open_folder(path)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    """Each tensor lies where the index says."""
    path = make_checkpoint(tmp_path, shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(file for file in files if file != index["weight_map"][NORM])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"tensor {NORM} is not in"):
        open_folder(path)


# ---- pickles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickled_weights_are_refused_by_name(suffix: str, tmp_path: Path) -> None:
    """Alone in a folder, or named directly."""
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / f"pytorch_model{suffix}")
    for source in (path, path / f"pytorch_model{suffix}"):
        with pytest.raises(ModelError, match="pickled weights, which can run code"):
            open_folder(source)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
@pytest.mark.parametrize("kind", ["zip", "pickle"])
def test_pickled_weights_are_refused_by_content(kind: str, name: str, tmp_path: Path) -> None:
    """Whatever the file is called."""
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data.pkl", b"x" * 4000)
    else:
        (tmp_path / name).write_bytes(pickle.dumps({"a": b"x" * 4000}))
    with pytest.raises(ModelError, match="holds pickled weights"):
        open_folder(tmp_path)


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def gguf_bytes(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<I", version) + u64(len(tensors)) + u64(len(keys)) + b"".join(keys + tensors)
    return head + bytes(-len(head) % 32) + data


def tensor_info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(map(u64, dims))
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<I", kind) + u64(offset)


STRING_KEY = text("a") + struct.pack("<I", 8)
ARRAY_KEY = text("a") + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF", "too few"),
        (b"FUGG" + bytes(40), "not a GGUF file"),
        (gguf_bytes([], [], version=99), "version 99"),
        (gguf_bytes([], [], version=3 << 24), "little-endian"),
        (b"GGUF" + struct.pack("<I", 3) + u64(2**60) + u64(0), "tensor_count is 1152921504606846976"),
        (b"GGUF" + struct.pack("<I", 3) + u64(0) + u64(2**60), "kv_count is"),
        (gguf_bytes([STRING_KEY + u64(2**62)], []), "a string of 4611686018427387904 bytes"),
        (gguf_bytes([STRING_KEY + u64(40) + b"x"], []), "ends inside a"),
        (gguf_bytes([ARRAY_KEY + struct.pack("<I", 8) + u64(2**61)], []), "an array of 2305843009213693952 entries"),
        (gguf_bytes([ARRAY_KEY + struct.pack("<I", 9) + u64(3)], []), "arrays of value type 9"),
        (gguf_bytes([text("a") + struct.pack("<I", 77)], []), "unknown value type 77"),
        (gguf_bytes([STRING_KEY + text("x")] * 2, []), "key 'a' appears twice"),
        (gguf_bytes([STRING_KEY + u64(1) + b"\xff"], []), "not UTF-8"),
        (gguf_bytes([text("general.alignment") + struct.pack("<II", 4, 24)], []), "general.alignment is 24"),
        (gguf_bytes([], [tensor_info("t", [2**38])]), "t: 1099511627776 bytes at .* but the file has only"),
        (gguf_bytes([], [tensor_info("t", [2**63, 2**63])]), "t: .* bytes at"),
        (gguf_bytes([], [tensor_info("t", [0])]), r"t: shape \[0\]"),
        (gguf_bytes([], [tensor_info("t", [1] * 9)]), "9 dimensions"),
        (gguf_bytes([], [tensor_info("t", [8], kind=999)]), "unknown type 999"),
        (gguf_bytes([], [tensor_info("t", [8], offset=4)]), "offset 4 is no multiple of 32"),
        (gguf_bytes([], [tensor_info("t", [33], kind=2)]), "multiple of 32"),
        (gguf_bytes([], [tensor_info("t", [8])] * 2, bytes(64)), "tensor t appears twice"),
        (gguf_bytes([], [tensor_info("t", [16]), tensor_info("u", [8], offset=32)], bytes(64)), "t and u overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_lying_gguf_header_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    """Every count, length, type and offset is checked against the file before it is used."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        read_gguf(path)


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.99])
def test_a_cut_gguf_file_is_refused(share: float, tmp_path: Path) -> None:
    """Wherever it was cut, the file and what lacks are named."""
    path = make_gguf(tmp_path / "tiny.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match=r"tiny\.gguf: "):
        load_model(path)


def test_the_strict_reader_reads_what_the_library_reads(tmp_path: Path) -> None:
    """On an honest file both agree: keys, shapes, types, offsets."""
    path = make_gguf(tmp_path / "tiny.gguf")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (found.type, found.offset, found.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_every_quantized_type_of_the_library_is_read_reads_tensors(tmp_path: Path) -> None:
    """Each type that the library can dequantize comes out as the library says."""
    values = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16):
        path = tmp_path / f"{kind.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        quantized = gguf.quants.quantize(values, kind)
        writer.add_tensor("t.weight", quantized, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        weights = GGUFWeights(read_gguf(path), open_folder("toy").config)
        expected = gguf.quants.dequantize(quantized, kind)
        assert np.array_equal(weights.read("t.weight", torch.float32).numpy(), expected)


def test_gguf_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """The names in messages are those of the checkpoint, the file is named too."""
    path = make_gguf(tmp_path / "tiny.gguf", TinyLlama(layers=3))
    raw = path.read_bytes()
    # The block count is a u32 behind its key and type.
    at = raw.index(b"llama.block_count") + len(b"llama.block_count") + 4
    path.write_bytes(raw[:at] + struct.pack("<I", 2) + raw[at + 4 :])
    with pytest.raises(ModelError, match=r"tiny\.gguf: model\.layers\.2\..* the model's config has no place"):
        load_model(path)


# ---- folders -------------------------------------------------------------------------------------------------------


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Nothing there, an empty folder, several GGUF files, a config without weights."""
    with pytest.raises(ModelError, match="no such file or folder"):
        open_folder(tmp_path / "absent")
    with pytest.raises(ModelError, match="no model: "):
        open_folder(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        open_folder(tmp_path)
    other = make_checkpoint(tmp_path / "other")
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither"):
        open_folder(other)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"accepted: a \.gguf file"):
        open_folder(tmp_path / "notes.txt")


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    """As the demo model lies."""
    path = make_gguf(tmp_path / "tiny.gguf")
    assert open_folder(tmp_path) == open_folder(path)


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    """Equal files have equal digests; other weights, config or tokenizer another one."""
    base = open_folder(make_checkpoint(tmp_path / "a")).digest
    assert open_folder(make_checkpoint(tmp_path / "b")).digest == base
    assert open_folder(make_checkpoint(tmp_path / "c", TinyLlama(seed=8))).digest != base
    for file in ("config.json", "tokenizer.json"):
        changed = make_checkpoint(tmp_path / file)
        (changed / file).write_text((changed / file).read_text().replace("{", "{ ", 1))
        assert open_folder(changed).digest != base
    assert open_folder("toy").digest != open_folder("toy:layers=2").digest
