"""Key files: created private, read only when they are."""

from pathlib import Path

import pytest

from kvferry_service.key_files import KeyFileError, copy_keys, create_keys, load_keys, secret_strings


def test_created_keys_are_private_and_read_back(tmp_path: Path) -> None:
    """Folder 0700, files 0600, four different keys; creating again keeps them."""
    folder = tmp_path / "keys"
    create_keys(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    keys = load_keys(folder, need_kv=True)
    assert len({keys.http, keys.kv, keys.state, keys.hash}) == 4
    create_keys(folder)
    assert load_keys(folder, need_kv=True) == keys
    assert sorted(path.name for path in folder.iterdir()) == ["hash", "http", "kv", "state"]
    assert all(text not in repr(keys) for text in secret_strings(keys))


def test_a_router_holds_no_kv_key(tmp_path: Path) -> None:
    """The router's folder has three files; a pod cannot start from it."""
    create_keys(tmp_path / "all")
    copy_keys(tmp_path / "all", tmp_path / "router", ("http", "state", "hash"))
    copy_keys(tmp_path / "all", tmp_path / "router", ("http", "state", "hash"))
    assert load_keys(tmp_path / "router", need_kv=False).kv is None
    with pytest.raises(KeyFileError, match="kv: No such file"):
        load_keys(tmp_path / "router", need_kv=True)


def test_all_faults_are_named_together(tmp_path: Path) -> None:
    """A readable file, a short one and a missing one appear in one message, with what is expected."""
    create_keys(tmp_path)
    (tmp_path / "http").chmod(0o644)
    (tmp_path / "state").write_text("abc")
    (tmp_path / "hash").unlink()
    with pytest.raises(KeyFileError) as caught:
        load_keys(tmp_path, need_kv=True)
    text = str(caught.value)
    assert "http: mode 0644" in text
    assert "state: not a key; 64 hex digits" in text
    assert "hash: No such file" in text


def test_equal_keys_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    """Two planes never share a key."""
    create_keys(tmp_path / "k")
    (tmp_path / "k/http").write_text((tmp_path / "k/kv").read_text())
    with pytest.raises(KeyFileError, match="two keys are equal"):
        load_keys(tmp_path / "k", need_kv=True)
    with pytest.raises(KeyFileError, match="no such folder"):
        load_keys(tmp_path / "none", need_kv=False)
