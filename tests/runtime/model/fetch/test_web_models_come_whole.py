"""Models from plain web servers: whole and checked, whatever the server does, or not there at all."""

import errno
import hashlib
import io
import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from kvferry_runtime.model.fetch import FetchError, FetchOptions, collect, download, get, place
from kvferry_runtime.model.folder import open_folder
from kvferry_wire.fetch import FetchReason
from tests.runtime.model.fetch.conftest import LIMITS, QUIET
from tests.runtime.model.fetch.servers import FileServer, serve_folder
from tests.support.checkpoints import make_checkpoint, make_gguf

SHARD = "model-00001-of-00002.safetensors"
ONE_TRY = msgspec.structs.replace(QUIET, limits=msgspec.structs.replace(LIMITS, fetch_tries=1))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def home(root: Path) -> Path:
    """The one folder of a source."""
    (found,) = [path for path in root.iterdir() if path.is_dir()]
    return found


def failed(address: str, root: Path, options: FetchOptions = QUIET) -> FetchError:
    with pytest.raises(FetchError) as caught:
        get(address, root, options)
    return caught.value


def test_a_folder_needs_no_index_of_its_files(server: FileServer, model: Path, root: Path) -> None:
    """Known names and the weights' own index are enough; the copy is the model, byte for byte."""
    fetched = get(serve_folder(server, model), root, QUIET)
    assert names(fetched.path) == names(model) | {place.RECORD_FILE}
    assert open_folder(fetched.path).digest == open_folder(model).digest
    assert fetched.bytes == sum(file.stat().st_size for file in model.iterdir())
    assert names(home(root)) == {fetched.path.name, place.LATEST}


def test_a_model_that_is_there_is_not_fetched_again(server: FileServer, model: Path, root: Path) -> None:
    """The server is asked whether it has changed, and no weight comes twice."""
    address = serve_folder(server, model)
    first = get(address, root, QUIET)
    sent = dict(server.sent)
    assert get(address, root, QUIET).path == first.path
    assert server.sent["/m/" + SHARD] == sent["/m/" + SHARD]
    assert names(home(root)) == {first.path.name, place.LATEST}


def test_a_damaged_copy_is_fetched_again(server: FileServer, model: Path, root: Path) -> None:
    """A byte changed on the disk is found by the digest."""
    address = serve_folder(server, model)
    path = get(address, root, QUIET).path / SHARD
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert (get(address, root, QUIET).path / SHARD).read_bytes() == content


def test_one_gguf_file(server: FileServer, tmp_path: Path, root: Path) -> None:
    """By its own address, with the digest that the address asks for."""
    file = make_gguf(tmp_path / "tiny.gguf")
    server.files["/x/tiny.gguf"] = file.read_bytes()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    fetched = get(f"{server.url}/x/tiny.gguf#sha256={digest}", root, QUIET)
    assert open_folder(fetched.path).kind == "gguf"
    error = failed(f"{server.url}/x/tiny.gguf#sha256={'0' * 64}", root)
    assert "SHA-256" in str(error) and "expected 0000" in str(error)
    assert error.reason == FetchReason.FAILED


@pytest.mark.parametrize("ranges", [True, False])
def test_a_transfer_that_breaks_goes_on(server: FileServer, model: Path, root: Path, ranges: bool) -> None:
    """From where it stopped; from the start on a server that cannot send parts."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.ranges, server.cuts[path] = ranges, [1000, 2000]
    fetched = get(address, root, QUIET)
    assert (fetched.path / SHARD).read_bytes() == server.files[path]
    asked = [seen.headers.get("Range") for seen in server.asked(path)]
    assert len(asked) == 3
    assert asked[0] is None and None not in asked[1:]
    if ranges:
        assert server.sent[path] == len(server.files[path])


def test_an_earlier_process_is_continued(server: FileServer, model: Path, root: Path) -> None:
    """What a killed fetch left is taken over, whole files and parts; nothing of it has the model's name before."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.cuts[path] = [3000]
    error = failed(address, root, ONE_TRY)
    assert "the connection" in str(error) and error.reason == FetchReason.FAILED
    assert names(home(root)) == {place.PARTIAL}
    get(address, root, QUIET)
    assert server.sent[path] == len(server.files[path])
    config = server.asked("/m/config.json")
    assert len(config) == 1


def test_content_that_changes_between_two_tries_is_never_mixed(server: FileServer, model: Path, root: Path) -> None:
    """A part of the old content is thrown away."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.cuts[path] = [3000]
    failed(address, root, ONE_TRY)
    other = make_checkpoint(root.parent / "other", shards=2)
    server.files[path] = (other / SHARD).read_bytes()[:-8] + b"\0" * 8
    fetched = get(address, root, QUIET)
    assert (fetched.path / SHARD).read_bytes() == server.files[path]


def test_content_that_changes_during_a_fetch_is_told(server: FileServer, model: Path, root: Path) -> None:
    """Sizes or validators that differ from what was described end it; the next fetch has the new content whole."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.statuses[path] = []
    old = server.files[path]

    class Changing(dict[str, bytes]):
        def __getitem__(self, key: str) -> bytes:
            if key == path and len(server.asked(path)) == 1:
                server.files = dict(self) | {path: old + b"\0"}
            return super().__getitem__(key)

    server.files = Changing(server.files)
    server.cuts[path] = [10]
    assert "changes while it is fetched" in str(failed(address, root))


def test_a_new_version_lies_beside_the_old(server: FileServer, model: Path, root: Path) -> None:
    """Files of a version never change: an engine that runs from them keeps what it has read."""
    address = serve_folder(server, model)
    first = get(address, root, QUIET)
    server.files["/m/generation_config.json"] = b'{"temperature": 0.1}'
    second = get(address, root, QUIET)
    assert first.path != second.path
    assert (first.path / "generation_config.json").read_bytes() != (second.path / "generation_config.json").read_bytes()
    assert (home(root) / place.LATEST).resolve() == second.path


def test_without_the_server_the_last_version_serves(
    server: FileServer, model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said, and only for what another try might mend: a model that was taken away is not served on."""
    address = serve_folder(server, model)
    first = get(address, root, QUIET)
    server.statuses["/m/config.json"] = [503] * 9
    server.validators = False
    server.statuses["/m/SHA256SUMS"] = [503] * 9
    loud = msgspec.structs.replace(QUIET, show="auto")
    assert get(address, root, loud).path == first.path
    assert "what was fetched before is used" in capsys.readouterr().err
    server.statuses.clear()
    del server.files["/m/config.json"]
    assert failed(address, root).reason == FetchReason.MISSING


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (401, FetchReason.DENIED, "spec.model.tokenSecretRef"),
        (403, FetchReason.DENIED, "status 403"),
        (404, FetchReason.MISSING, "there is no config.json"),
        (410, FetchReason.MISSING, "there is no config.json"),
        (400, FetchReason.FAILED, "status 400"),
        (500, FetchReason.FAILED, "status 500 (3 tries)"),
    ],
)
def test_each_refusal_has_its_reason(
    server: FileServer, model: Path, root: Path, status: int, reason: FetchReason, said: str
) -> None:
    """Gone, closed or broken: words that a person can act on."""
    address = serve_folder(server, model)
    server.statuses["/m/config.json"] = [status] * 9
    error = failed(address, root)
    assert error.reason == reason
    assert said in str(error)
    assert "\n" not in str(error)


def test_passing_faults_are_tried_again(server: FileServer, model: Path, root: Path) -> None:
    """Also as often and as late as the server asks for."""
    address = serve_folder(server, model)
    server.statuses["/m/config.json"] = [503, 429]
    server.statuses["/m/" + SHARD] = [502, 500]
    server.headers["/m/config.json"] = {"Retry-After": "0"}
    get(address, root, QUIET)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"auto_map": {"AutoModel": "x.Model"}}, FetchReason.REMOTE_CODE),
        ({"architectures": ["Other"]}, FetchReason.REFUSED),
    ],
)
def test_a_model_that_is_not_served_costs_no_download(
    server: FileServer, model: Path, root: Path, config: dict[str, object], reason: FetchReason
) -> None:
    """Its configuration is looked at before any weight is asked for."""
    address = serve_folder(server, model)
    whole = msgspec.json.decode(server.files["/m/config.json"]) | config
    server.files["/m/config.json"] = msgspec.json.encode(whole)
    assert failed(address, root).reason == reason
    assert not [seen for seen in server.seen if seen.path.endswith(".safetensors")]


def test_bytes_that_are_not_what_the_server_says_are_refused(server: FileServer, model: Path, root: Path) -> None:
    """``SHA256SUMS`` beside the model is compared with what comes; what is wrong is thrown away."""
    address = serve_folder(server, model)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in model.iterdir()]
    server.files["/m/SHA256SUMS"] = "".join(sums).encode()
    server.damage.add("/m/" + SHARD)
    error = failed(address, root)
    assert SHARD in str(error) and "SHA-256" in str(error)
    server.damage.clear()
    assert open_folder(get(address, root, QUIET).path).digest == open_folder(model).digest


def test_a_damaged_model_never_gets_its_name(server: FileServer, model: Path, root: Path) -> None:
    """Headers are checked as the engine checks them; a later, whole one is fetched anew."""
    address = serve_folder(server, model)
    good = server.files["/m/" + SHARD]
    server.files["/m/" + SHARD] = good[:-100]
    assert failed(address, root).reason == FetchReason.REFUSED
    assert not (home(root) / place.LATEST).exists()
    server.files["/m/" + SHARD] = good
    get(address, root, QUIET)


def test_a_model_larger_than_allowed_is_not_fetched(server: FileServer, model: Path, root: Path) -> None:
    """Nor one for which the disk has no room: both are told in sizes, before any weight comes."""
    address = serve_folder(server, model)
    error = failed(address, root, msgspec.structs.replace(QUIET, max_bytes=10_000))
    assert error.reason == FetchReason.DISK_FULL
    assert "at most 9.8 KiB" in str(error) and "spec.model.size" in str(error)
    assert not server.asked("/m/" + SHARD)


def test_no_room_is_told_before_and_during(
    server: FileServer, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free space is compared first; a disk that fills up meanwhile is the same reason."""
    address = serve_folder(server, model)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patched:
        patched.setattr(place.shutil, "disk_usage", lambda _: usage._replace(free=place.ROOM_LEFT + 100))
        error = failed(address, root)
    assert error.reason == FetchReason.DISK_FULL and "100 B free" in str(error)
    assert not server.asked("/m/" + SHARD)

    class Full(io.FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode="r", *more: Full(path, "r+") if mode == "r+b" else opened(path, mode, *more)
    )
    error = failed(address, root)
    assert error.reason == FetchReason.DISK_FULL and "no space left" in str(error)


def test_a_server_that_goes_silent_is_left(server: FileServer, model: Path, root: Path) -> None:
    """No byte for the stall time: another connection goes on."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.stalls.add(path)
    limits = msgspec.structs.replace(LIMITS, fetch_stall_s=0.3)
    get(address, root, msgspec.structs.replace(QUIET, limits=limits))
    assert server.asked(path)[1].headers["Range"]


def test_the_whole_fetch_has_a_deadline(server: FileServer, model: Path, root: Path) -> None:
    """A server that is merely slow does not hold it for ever."""
    address = serve_folder(server, model)
    server.stalls.add("/m/" + SHARD)
    limits = msgspec.structs.replace(LIMITS, fetch_s=0.5)
    error = failed(address, root, msgspec.structs.replace(QUIET, limits=limits))
    assert "not fetched within" in str(error) and error.reason == FetchReason.FAILED


def test_a_file_without_a_size_must_be_small(server: FileServer, model: Path, root: Path) -> None:
    """A chunked configuration is fine up to its cap; weights without a size are refused: nobody could tell the end."""
    address = serve_folder(server, model)
    server.chunked |= {"/m/config.json", "/m/tokenizer.json"}
    get(address, root, QUIET)
    server.files["/m/tokenizer.json"] += b" " * 5000
    limits = msgspec.structs.replace(LIMITS, fetch_text_bytes=len(server.files["/m/tokenizer.json"]) - 1)
    error = failed(address, root, msgspec.structs.replace(QUIET, limits=limits))
    assert error.reason == FetchReason.REFUSED
    server.chunked.add("/m/" + SHARD)
    assert "says no size" in str(failed(address, root))


def test_a_server_that_knows_no_head_is_asked_otherwise(server: FileServer, model: Path, root: Path) -> None:
    """By a GET of one byte."""
    server.head = False
    get(serve_folder(server, model), root, QUIET)
    assert server.asked("/m/config.json")[0].headers["Range"] == "bytes=0-0"


def test_an_encoded_answer_is_refused(server: FileServer, model: Path, root: Path) -> None:
    """Sizes and digests would be of something else."""
    address = serve_folder(server, model)
    server.headers["/m/config.json"] = {"Content-Encoding": "gzip"}
    assert "encoded (gzip)" in str(failed(address, root))


def test_concurrent_fetches_download_once(server: FileServer, model: Path, root: Path) -> None:
    """They wait for each other over a lock file."""
    address = serve_folder(server, model)
    threads = [threading.Thread(target=get, args=(address, root, QUIET)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert server.sent["/m/" + SHARD] == len(server.files["/m/" + SHARD])


def test_a_fetch_that_waits_too_long_for_another_ends(server: FileServer, model: Path, root: Path) -> None:
    """With the name of what it waits for."""
    address = serve_folder(server, model)
    limits = msgspec.structs.replace(LIMITS, fetch_lock_s=0.05)
    name = place.slug("web", address)
    with place.locked(root, name, 1.0):
        error = failed(address, root, msgspec.structs.replace(QUIET, limits=limits))
    assert "another process" in str(error)


def test_pickles_and_several_gguf_files_are_refused_by_name() -> None:
    """Stores that list their files say at once what is wrong with them."""
    with pytest.raises(FetchError, match=r"pytorch_model\.bin holds pickled weights"):
        collect.choose({"config.json", "pytorch_model.bin"}, "x")
    with pytest.raises(FetchError, match=r"2 \.gguf files.*\(a\.gguf, b\.gguf\)"):
        collect.choose({"b.gguf", "a.gguf"}, "x")
    with pytest.raises(FetchError, match="no model") as caught:
        collect.choose({"README.md"}, "x")
    assert caught.value.reason == FetchReason.MISSING
    assert collect.choose({"config.json", "model.safetensors", "a.gguf"}, "x") is None
    assert collect.choose({"a.gguf", "README.md"}, "x") == "a.gguf"


def test_tries_count_anew_after_each_byte(server: FileServer, model: Path, root: Path) -> None:
    """A bad line costs time; only one that brings nothing any more ends the fetch."""
    address, path = serve_folder(server, model), "/m/" + SHARD
    server.cuts[path] = [500] * 20
    get(address, root, QUIET)
    assert len(server.asked(path)) == 21
    assert download.ASKED < LIMITS.fetch_tries < 20
