"""`kvferry up` and `kvferry serve` take the sources that a cluster takes, and what is fetched is told."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry_cli.errors import UserError
from kvferry_cli.main import main
from kvferry_cli.models import fetch_model, resolve_model
from kvferry_operator.api.source import parse_source
from kvferry_runtime.model.folder import open_folder
from kvferry_wire.fetch import FETCH_EXITS, FetchReason
from tests.runtime.model.fetch.fake_s3 import fake_s3
from tests.runtime.model.fetch.servers import FileServer, file_server, serve_folder
from tests.support.checkpoints import make_checkpoint


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    monkeypatch.setenv("KVFERRY_MODELS", str(tmp_path / "models"))
    with file_server() as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny")


def test_a_web_servers_folder_is_resolved(server: FileServer, model: Path) -> None:
    """To an absolute path that the engine takes; one line tells that it was fetched."""
    path = resolve_model(parse_source(serve_folder(server, model)), Path("."), progress=False)
    assert Path(path).is_absolute()
    assert open_folder(path).digest == open_folder(model).digest


def test_a_bucket_is_resolved_with_the_manifests_endpoint(
    server: FileServer, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Credentials are not the manifest's: they are found as by AWS's tools, here in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with fake_s3() as store:
        store.key_id = "AKIA1"
        store.put("models", "tiny/", model)
        path = resolve_model(parse_source("s3://models/tiny"), Path("."), progress=False, s3_endpoint=store.files.url)
    assert open_folder(path).digest == open_folder(model).digest


def test_each_failure_has_its_status_where_a_pod_reads_it(server: FileServer) -> None:
    """`model fetch` ends with the reason's status; other commands end as they always do."""
    source = parse_source(server.url + "/none/")
    with pytest.raises(UserError, match=r"there is no config\.json") as caught:
        fetch_model(source, Path("."), progress=False)
    assert caught.value.code == FETCH_EXITS[FetchReason.MISSING]
    with pytest.raises(UserError) as caught:
        resolve_model(source, Path("."), progress=False)
    assert caught.value.code == 1


def test_the_link_and_the_report_are_of_what_was_fetched(
    server: FileServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when a link of that name is there already; a folder of that name is left alone."""
    address = serve_folder(server, model)
    root, report = tmp_path / "models", tmp_path / "report"
    for _ in range(2):
        assert main(["model", "fetch", "--quiet", "--link", "model", "--report", str(report), address]) == 0
        assert (root / "model").is_symlink()
        assert open_folder(root / "model").digest == open_folder(model).digest
        assert json.loads(report.read_text())["source"] == address
    assert not (root / "model").readlink().is_absolute()
    assert str(root) in capsys.readouterr().out
    (root / "taken").mkdir()
    assert main(["model", "fetch", "--quiet", "--link", "taken", address]) == 1
    assert "a link cannot take its place" in capsys.readouterr().err
    assert main(["model", "fetch", "--quiet", "--report", str(tmp_path / "no" / "r"), address]) == 1
    assert "--report" in capsys.readouterr().err
