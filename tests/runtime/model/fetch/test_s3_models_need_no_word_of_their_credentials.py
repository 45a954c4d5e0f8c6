"""Models from S3, by the real client library against a small store of our own."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry_runtime.model.fetch import FetchError, FetchOptions, get, s3
from kvferry_runtime.model.folder import open_folder
from kvferry_wire.fetch import FetchReason
from tests.runtime.model.fetch.conftest import LIMITS, QUIET
from tests.runtime.model.fetch.fake_s3 import FakeS3, checksum, fake_s3
from tests.support.checkpoints import make_gguf

SHARD = "llama/model-00001-of-00002.safetensors"
SECRET = "wJalrXUtnFEMI"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeS3]:
    """A store, and a machine without credentials of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with fake_s3() as running:
        yield running


def options(store: FakeS3, **more: object) -> FetchOptions:
    return msgspec.structs.replace(QUIET, s3_endpoint=store.files.url, **more)


def keys(folder: Path, key_id: str = "AKIA1") -> Path:
    """Credentials as a Secret is mounted."""
    folder.mkdir()
    (folder / "AWS_ACCESS_KEY_ID").write_text(key_id + "\n")
    (folder / "AWS_SECRET_ACCESS_KEY").write_text(SECRET)
    return folder


def failed(name: str, root: Path, given: FetchOptions) -> FetchError:
    with pytest.raises(FetchError) as caught:
        get(name, root, given)
    assert SECRET not in str(caught.value) and "Signature" not in str(caught.value)
    return caught.value


def test_the_objects_below_a_prefix_are_a_model(store: FakeS3, model: Path, root: Path, tmp_path: Path) -> None:
    """Signed with the mounted credentials; listings may come in pages, deeper objects are not taken."""
    store.put("models", "llama/", model)
    store.buckets["models"] |= {"llama/": b"", "llama/original/consolidated.pth": b"x", "llama/README.md": b"x"}
    store.key_id, store.page = "AKIA1", 3
    fetched = get("s3://models/llama", root, options(store, s3_credentials=keys(tmp_path / "keys")))
    assert open_folder(fetched.path).digest == open_folder(model).digest
    assert not (fetched.path / "README.md").exists()
    sent = sum(count for path, count in store.files.sent.items() if path.endswith(".safetensors"))
    get("s3://models/llama/", root, options(store, s3_credentials=tmp_path / "keys"))
    assert sum(count for path, count in store.files.sent.items() if path.endswith(".safetensors")) >= sent


def test_what_is_there_is_not_fetched_again(store: FakeS3, model: Path, root: Path) -> None:
    """The listing and the objects' descriptions are enough."""
    store.put("models", "llama/", model)
    first = get("s3://models/llama", root, options(store))
    sent = store.files.sent[f"/models/{SHARD}"]
    assert get("s3://models/llama", root, options(store)).path == first.path
    assert store.files.sent[f"/models/{SHARD}"] == sent


def test_a_public_bucket_needs_no_credentials(store: FakeS3, root: Path, tmp_path: Path) -> None:
    """Requests are then not signed; one .gguf object is a model too."""
    folder = tmp_path / "x"
    folder.mkdir()
    make_gguf(folder / "a.gguf")
    make_gguf(folder / "b.gguf")
    store.put("public", "x/", folder)
    assert open_folder(get("s3://public/x/b.gguf", root, options(store)).path).kind == "gguf"
    assert not [seen for seen in store.files.seen if "Authorization" in seen.headers or "Signature" in seen.path]
    assert "2 .gguf files" in str(failed("s3://public/x", root, options(store)))


def test_a_bucket_elsewhere_is_found(store: FakeS3, model: Path, root: Path, tmp_path: Path) -> None:
    """The store tells the region; it need not be given."""
    store.put("models", "llama/", model)
    store.region = "eu-west-3"
    given = options(store, s3_credentials=keys(tmp_path / "keys"))
    assert open_folder(get("s3://models/llama", root, given).path).digest == open_folder(model).digest
    get("s3://models/llama", root / "again", msgspec.structs.replace(given, s3_region="eu-west-3"))


def test_a_cut_object_goes_on(store: FakeS3, model: Path, root: Path) -> None:
    """Each try is signed anew and asks for the rest of the same object."""
    store.put("models", "llama/", model)
    store.files.cuts[f"/models/{SHARD}"] = [4000, 4000]
    get("s3://models/llama", root, options(store))
    assert store.files.sent[f"/models/{SHARD}"] == len(store.buckets["models"][SHARD])


def test_an_object_that_changes_meanwhile_is_told(store: FakeS3, model: Path, root: Path) -> None:
    """The store itself is asked to compare."""
    store.put("models", "llama/", model)
    store.files.cuts[f"/models/{SHARD}"] = [10]
    handle = store.files.handle

    async def changing(request: object) -> object:
        answer = await handle(request)  # type: ignore[arg-type]
        store.buckets["models"][SHARD] += b"\0"
        return answer

    store.files.handle = changing  # type: ignore[method-assign, assignment]
    assert "changes while it is fetched" in str(failed("s3://models/llama", root, options(store)))


def test_checksums_of_the_store_are_compared(store: FakeS3, model: Path, root: Path) -> None:
    """The ETag of what was put in one piece, and the SHA-256 where it has one; parts have neither."""
    store.put("models", "llama/", model)
    store.wrong_md5.add(SHARD)
    assert "MD5" in str(failed("s3://models/llama", root, options(store)))
    store.multipart = True
    store.sha256[SHARD] = checksum(b"other")
    assert "SHA-256" in str(failed("s3://models/llama", root, options(store)))
    store.sha256[SHARD] = checksum(store.buckets["models"][SHARD])
    get("s3://models/llama", root, options(store))


@pytest.mark.parametrize(
    ("head", "md5", "sha256", "crc32"),
    [
        ({"ETag": '"' + "a" * 32 + '"'}, "a" * 32, None, None),
        ({"ETag": '"' + "a" * 32 + '-3"'}, None, None, None),
        ({"ETag": '"' + "a" * 32 + '"', "ServerSideEncryption": "aws:kms"}, None, None, None),
        ({"ETag": '"x"', "ChecksumSHA256": checksum(b""), "ChecksumType": "COMPOSITE"}, None, None, None),
        ({"ETag": '"x"', "ChecksumSHA256": checksum(b"") + "-2"}, None, None, None),
        ({"ETag": '"x"', "ChecksumCRC32": "AAAAAQ=="}, None, None, 1),
    ],
)
def test_only_what_covers_the_whole_object_counts(
    head: dict[str, str], md5: str | None, sha256: str | None, crc32: int | None
) -> None:
    """An ETag is an MD5 only of what came in one piece; checksums of parts say nothing of the whole."""
    found = s3.described("x", {"ContentLength": 1, **head})
    assert (found.md5, found.sha256, found.crc32) == (md5, sha256, crc32)


@pytest.mark.parametrize(
    ("case", "reason", "said"),
    [
        ("no bucket", FetchReason.MISSING, "there is no bucket"),
        ("empty prefix", FetchReason.MISSING, "nothing lies there"),
        ("no credentials", FetchReason.DENIED, "spec.model.s3.secretRef"),
        ("wrong credentials", FetchReason.DENIED, "s3:ListBucket"),
        ("half credentials", FetchReason.DENIED, "no entry AWS_SECRET_ACCESS_KEY"),
        ("down", FetchReason.FAILED, "(3 tries)"),
        ("gone", FetchReason.FAILED, "no connection"),
        ("metadata", FetchReason.REFUSED, "never asked"),
        ("endpoint", FetchReason.REFUSED, "nothing behind it"),
    ],
)
def test_each_refusal_has_its_reason(
    store: FakeS3, model: Path, root: Path, tmp_path: Path, case: str, reason: FetchReason, said: str
) -> None:
    """In one line, with what to do, and never with a credential or a signature."""
    store.put("models", "llama/", model)
    given, name = options(store, s3_credentials=keys(tmp_path / "keys", "AKIA2")), "s3://models/llama"
    if case == "no bucket":
        name = "s3://other/llama"
    elif case == "empty prefix":
        name = "s3://models/none"
    elif case in ("no credentials", "wrong credentials"):
        store.key_id = "AKIA1"
        given = given if case.startswith("wrong") else options(store)
    elif case == "half credentials":
        (tmp_path / "keys" / "AWS_SECRET_ACCESS_KEY").unlink()
    elif case == "down":
        store.down = True
    elif case in ("gone", "metadata", "endpoint"):
        address = {"gone": "http://127.0.0.1:9", "metadata": "http://169.254.169.254", "endpoint": "http://h/x"}[case]
        given = msgspec.structs.replace(given, s3_endpoint=address)
    error = failed(name, root, given)
    assert said in str(error)
    assert error.reason == reason


@pytest.mark.parametrize("text", ["s3://", "s3://A/x", "s3://a", "s3://-ab/x"])
def test_only_bucket_names_are_asked(text: str, root: Path) -> None:
    """Anything else is refused as it is written."""
    assert failed(text, root, QUIET).reason == FetchReason.REFUSED


def test_without_the_library_its_name_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra of its own."""
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    assert "kvferry[s3]" in str(failed("s3://models/llama", root, msgspec.structs.replace(QUIET, limits=LIMITS)))
