"""Models of the hub, by its real client against a hub of our own: one commit, whole, or words to act on."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry_runtime.model.fetch import FetchError, FetchOptions, get
from kvferry_runtime.model.folder import open_folder
from kvferry_wire.fetch import FETCH_EXITS, FetchReason, FetchReport, decode_report
from tests.runtime.model.fetch.conftest import LIMITS, QUIET
from tests.runtime.model.fetch.fake_hub import COMMIT, FakeHub, fake_hub
from tests.support.checkpoints import make_checkpoint, make_gguf

NEXT = "2" * 40
ONE_TRY = msgspec.structs.replace(QUIET, limits=msgspec.structs.replace(LIMITS, fetch_tries=1))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that the hub's own client talks to, without a token of this machine."""
    from huggingface_hub import constants

    with fake_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.files.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


def failed(name: str, root: Path, options: FetchOptions = QUIET) -> FetchError:
    with pytest.raises(FetchError) as caught:
        get(name, root, options)
    return caught.value


def test_a_branch_becomes_one_commit(hub: FakeHub, model: Path, root: Path) -> None:
    """It is resolved once, told, and all files are of it; large ones come from elsewhere by a redirect."""
    hub.push("org/tiny", model)
    fetched = get("org/tiny", root, QUIET)
    assert fetched.commit == COMMIT
    assert fetched.path.name == COMMIT
    assert open_folder(fetched.path).digest == open_folder(model).digest
    assert {seen.path.split("/")[4] for seen in hub.files.seen if "/resolve/" in seen.path} == {COMMIT}


def test_a_push_is_a_new_version_beside_the_old(hub: FakeHub, model: Path, root: Path) -> None:
    """A branch that has moved gives the new commit; the one before stays as it was, and can still be asked for."""
    hub.push("org/tiny", model)
    first = get("hf://org/tiny@main", root, QUIET)
    hub.push("org/tiny", make_checkpoint(root.parent / "next", shards=1), NEXT)
    second = get("hf://org/tiny@main", root, QUIET)
    assert (first.commit, second.commit) == (COMMIT, NEXT)
    assert open_folder(first.path).digest == open_folder(model).digest
    assert get(f"hf://org/tiny@{COMMIT}", root, QUIET).path == first.path


def test_a_commit_that_is_here_needs_no_network(hub: FakeHub, model: Path, root: Path) -> None:
    """Named by the source or chosen by whoever runs the fetch: nothing is asked."""
    hub.push("org/tiny", model)
    path = get(f"hf://org/tiny@{COMMIT}", root, QUIET).path
    hub.files.seen.clear()
    assert get(f"hf://org/tiny@{COMMIT}", root, QUIET).path == path
    pinned = msgspec.structs.replace(QUIET, commit=COMMIT)
    assert get("org/tiny", root, pinned).path == path
    assert not hub.files.seen


def test_a_chosen_commit_goes_before_the_branch(hub: FakeHub, model: Path, root: Path) -> None:
    """A pod that starts later gets what the service began with, whatever was pushed since."""
    hub.push("org/tiny", model)
    hub.push("org/tiny", make_checkpoint(root.parent / "next", shards=1), NEXT)
    fetched = get("hf://org/tiny@main", root, msgspec.structs.replace(QUIET, commit=COMMIT))
    assert fetched.commit == COMMIT


def test_without_the_hub_the_same_revision_serves_on(hub: FakeHub, model: Path, root: Path) -> None:
    """What was fetched for another revision is not taken for it, nor for a commit that was chosen."""
    hub.push("org/tiny", model)
    path = get("hf://org/tiny@main", root, QUIET).path
    hub.down = 503
    assert get("hf://org/tiny@main", root, QUIET).path == path
    assert failed("hf://org/tiny@v1", root).reason == FetchReason.FAILED
    assert failed("hf://org/tiny@main", root, msgspec.structs.replace(QUIET, commit=NEXT)).reason == FetchReason.FAILED


def test_a_cut_file_goes_on_in_the_next_process(hub: FakeHub, model: Path, root: Path) -> None:
    """Within the file, by its commit."""
    hub.push("org/tiny", model)
    path = f"/cdn/{COMMIT}/model-00001-of-00002.safetensors"
    hub.files.cuts[path] = [5000]
    failed("org/tiny", root, ONE_TRY)
    get("org/tiny", root, QUIET)
    assert hub.files.sent[path] == len(hub.files.files[path])


def test_other_bytes_than_the_hub_lists_are_refused(hub: FakeHub, model: Path, root: Path) -> None:
    """Large files by their SHA-256, small ones as objects of git."""
    hub.push("org/tiny", model)
    path = f"/cdn/{COMMIT}/model-00001-of-00002.safetensors"
    hub.files.damage.add(path)
    assert "SHA-256" in str(failed("org/tiny", root))
    config = hub.commits["org/tiny"][COMMIT]["config.json"]
    serve = hub._file

    async def other(*given: object) -> object:
        hub.commits["org/tiny"][COMMIT]["config.json"] = config.replace(b"263", b"264")
        return await serve(*given)  # type: ignore[arg-type]

    hub._file = other  # type: ignore[method-assign, assignment]
    hub.commits["org/tiny"][COMMIT]["config.json"] = config
    assert "git object" in str(failed("org/tiny", root.with_name("again")))


@pytest.mark.parametrize(
    ("case", "reason", "said"),
    [
        ("unknown", FetchReason.MISSING, "no public model of this name"),
        ("unknown with a token", FetchReason.MISSING, "the token may not see it"),
        ("revision", FetchReason.MISSING, "no revision 'v9'"),
        ("private", FetchReason.MISSING, "HF_TOKEN"),
        ("gated", FetchReason.DENIED, "then give a token"),
        ("bad token", FetchReason.DENIED, "refuses the token (status 401)"),
        ("down", FetchReason.FAILED, "answers with status 502"),
        ("limited", FetchReason.FAILED, "answers with status 429"),
        ("gone", FetchReason.FAILED, "cannot be reached"),
    ],
)
def test_each_answer_of_the_hub_has_words(
    hub: FakeHub, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, case: str, reason: FetchReason, said: str
) -> None:
    """Missing, closed, refused, limited, away: told apart, in one line, with what to do."""
    hub.push("org/tiny", model)
    name = "org/tiny"
    hub.token = "good"
    if case.startswith("unknown"):
        name = "org/none"
        if "token" in case:
            monkeypatch.setenv("HF_TOKEN", "good")
    elif case == "revision":
        name = "hf://org/tiny@v9"
    elif case == "private":
        hub.private.add(name)
    elif case == "gated":
        hub.gated.add(name)
    elif case == "bad token":
        monkeypatch.setenv("HF_TOKEN", "bad")
    elif case in ("down", "limited"):
        hub.down = 502 if case == "down" else 429
    elif case == "gone":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = failed(name, root, ONE_TRY)
    assert error.reason == reason
    assert said in str(error)
    assert "\n" not in str(error) and "good" not in str(error).replace("good ", "")


def test_a_token_opens_a_gated_model_and_stays_with_the_hub(
    hub: FakeHub, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent to the hub, in each request of ours too."""
    hub.push("org/tiny", model)
    hub.gated.add("org/tiny")
    hub.token = "good"
    monkeypatch.setenv("HF_TOKEN", "good")
    assert get("org/tiny", root, QUIET).commit == COMMIT


def test_offline_mode_is_named(hub: FakeHub, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own switch is respected, and said where it is in the way."""
    from huggingface_hub import constants

    hub.push("org/tiny", model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = failed("org/tiny", root, ONE_TRY)
    assert "HF_HUB_OFFLINE" in str(error)
    assert not hub.files.seen


def test_of_several_gguf_files_one_must_be_named(hub: FakeHub, root: Path, tmp_path: Path) -> None:
    """Nothing is downloaded to find that out; one alone is taken."""
    folder = tmp_path / "quants"
    folder.mkdir()
    make_gguf(folder / "a.gguf")
    hub.push("org/one", folder)
    assert open_folder(get("org/one", root, QUIET).path).kind == "gguf"
    make_gguf(folder / "b.gguf")
    hub.push("org/two", folder)
    error = failed("org/two", root)
    assert error.reason == FetchReason.REFUSED and "a.gguf, b.gguf" in str(error)


def run_fetch(hub: FakeHub, root: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """`kvferry model fetch` as a pod's init container runs it."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    env = {**kept, "HOME": str(root.parent), "KVFERRY_MODELS": str(root), "HF_ENDPOINT": hub.files.url, **more}
    command = [sys.executable, "-P", "-m", "kvferry_cli", "model", "fetch", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_init_container_links_reports_and_exits_by_the_table(hub: FakeHub, model: Path, root: Path) -> None:
    """The model's place is known before its commit is; what was fetched is told; a refusal has its own status."""
    hub.push("org/tiny", model)
    hub.gated.add("org/tiny")
    hub.token = "good"
    root.mkdir()
    report = root.parent / "report"
    arguments = ("--link", "model", "--report", str(report), "hf://org/tiny@main")
    denied = run_fetch(hub, root, *arguments)
    assert denied.returncode == FETCH_EXITS[FetchReason.DENIED]
    assert denied.stderr.strip().splitlines()[-1].startswith("kvferry: hf://org/tiny@")
    assert not report.exists()
    (root.parent / "token").write_text("good\n")
    done = run_fetch(hub, root, *arguments, HF_TOKEN_PATH=str(root.parent / "token"))
    assert done.returncode == 0, done.stderr
    assert open_folder(root / "model").digest == open_folder(model).digest
    assert (root / "model").resolve().name == COMMIT
    size = sum(file.stat().st_size for file in model.iterdir())
    digest = open_folder(model).digest  # what the engine calls its model's
    told = FetchReport(source="hf://org/tiny@main", commit=COMMIT, digest=digest, bytes=size)
    assert decode_report(report.read_text()) == told
    hub.files.seen.clear()
    again = run_fetch(hub, root, *arguments, KVFERRY_MODEL_COMMIT=COMMIT)
    assert again.returncode == 0 and not hub.files.seen
    assert json.loads(report.read_text())["commit"] == COMMIT


def test_a_volume_that_is_too_small_is_told(hub: FakeHub, model: Path, root: Path) -> None:
    """By the cap that the pod's volume has, before anything is downloaded."""
    hub.push("org/tiny", model)
    done = run_fetch(hub, root, "--quiet", "--max-bytes", "5000", "org/tiny")
    assert done.returncode == FETCH_EXITS[FetchReason.DISK_FULL]
    assert "spec.model.size" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
