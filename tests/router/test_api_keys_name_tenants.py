"""API keys: of a file or a folder, read again on change, and a salt per tenant that the client cannot choose."""

from hashlib import sha256
from pathlib import Path

import pytest

from kvferry_router.key_source import ApiKeys
from kvferry_router.tenants import KeyFileError, default_tenant, parse_api_keys, parse_key_folder, salter


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def test_key_stands_for_its_tenant(tmp_path: Path) -> None:
    """Two keys of one tenant, one of another; anything else is nobody."""
    path = tmp_path / "keys"
    path.write_text(f"# keys\nacme:{digest('k1')}\nacme : {digest('k2').upper()}\n\nother:{digest('k3')}  # comment\n")
    keys = ApiKeys(path, 10)
    assert [keys.authenticate(f"Bearer {key}") for key in ("k1", "k2", "k3")] == ["acme", "acme", "other"]
    assert keys.authenticate("bearer  k1 ") == "acme"
    for header in (
        "",
        "k1",
        "Bearer",
        "Bearer ",
        "Basic k1",
        "Bearer nope",
        f"Bearer {digest('k1')}",
        "Bearer k1\udcff",
    ):
        assert keys.authenticate(header) is None


def test_file_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    """A revoked key is refused after the next look; a broken file is complained of once and the old keys stay."""
    path = tmp_path / "keys"
    path.write_text(f"acme:{digest('old')}\n")
    keys = ApiKeys(path, 10)
    assert not keys.reload()
    path.write_text(f"acme:{digest('new')}\nbeta:{digest('b')}\n")
    assert keys.reload()
    assert (keys.authenticate("Bearer old"), keys.authenticate("Bearer new")) == (None, "acme")
    path.write_text("acme:short\n")
    with pytest.raises(KeyFileError, match="line 1"):
        keys.reload()
    assert not keys.reload()
    assert keys.authenticate("Bearer new") == "acme"


def make_folder(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_a_folder_has_a_file_of_keys_for_each_tenant_and_lists_by_name(tmp_path: Path) -> None:
    """As a Secret is mounted, with the kubelet's own entries beside."""
    folder = make_folder(
        tmp_path / "keys",
        acme="# two while one replaces the other\nkey-of-acme-number-1\n\nkey-of-acme-number-2  # the new one\n",
        beta="key-of-beta-number-1",
        more__keys=f"gamma:{digest('g')}\n",
        most__json=f'{{"delta": "{digest("d")}"}}',
        nobody="",
    )
    (folder / "..data").mkdir()
    (folder / "..data" / "evil").write_text("key-of-evil-number-1")
    keys = ApiKeys(folder, 10)
    shown = ("key-of-acme-number-1", "key-of-acme-number-2", "key-of-beta-number-1", "g", "d", "key-of-evil-number-1")
    assert [keys.authenticate(f"Bearer {key}") for key in shown] == ["acme", "acme", "beta", "gamma", "delta", None]
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("acme", "short"),
        ("acme", f"acme:{digest('k')}"),  # a list under a name that is none
        ("acme", "two words that are long enough"),
        ("acme", "x" * 513),
        ("a b", "key-of-acme-number-1"),
        ("acme.keys", "a-tenant-with-a-long-name"),  # a list cut before its colon
        ("acme.keys", f"acme:{digest('k')[:40]}"),
        ("acme.json", '{"acme": "'),
        ("acme.json", "key-of-acme-number-1"),
    ],
)
def test_half_of_a_folder_opens_no_door_and_shows_no_key(tmp_path: Path, name: str, content: str) -> None:
    """Nothing that was cut off or put in the wrong place becomes a key: what was known before stays, and no more."""
    folder = make_folder(tmp_path / "keys", beta="key-of-beta-number-1")
    keys = ApiKeys(folder, 10)
    (folder / name).write_text(content)
    with pytest.raises(KeyFileError) as caught:
        keys.reload()
    assert name in str(caught.value)
    assert not any(part in str(caught.value) for part in (content, digest("k")[:40]) if len(content) > 5)
    assert keys.stale
    assert not keys.reload()
    assert keys.stale
    assert keys.authenticate("Bearer key-of-beta-number-1") == "beta"
    for shown in (content, content.partition(":")[2], "k"):
        assert keys.authenticate(f"Bearer {shown}") is None
    (folder / name).unlink()
    assert keys.reload()
    assert not keys.stale


def test_an_empty_folder_lets_nobody_in(tmp_path: Path) -> None:
    """It is not the same as no authentication; and says why nobody could ask."""
    keys = ApiKeys(make_folder(tmp_path / "keys"), 10)
    assert len(keys) == 0
    assert [keys.authenticate(header) for header in ("", "Bearer ", "Bearer x", "Bearer " + digest(""))] == [None] * 4
    assert keys.why_closed() == "there is no API key, so that nobody could ask"
    make_folder(tmp_path / "keys", acme="key-of-acme-number-1")
    assert keys.reload()
    assert keys.why_closed() == ""


def test_a_folder_that_goes_and_comes_back_is_read_again(tmp_path: Path) -> None:
    """The old keys stay meanwhile, as for a file."""
    folder = make_folder(tmp_path / "keys", acme="key-of-acme-number-1")
    keys = ApiKeys(folder, 10)
    folder.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(KeyFileError, match="No such file"):
            keys.reload()
    assert keys.stale
    assert keys.authenticate("Bearer key-of-acme-number-1") == "acme"
    (tmp_path / "away").rename(folder)
    assert keys.reload()
    assert not keys.stale


def test_caps_of_a_folder(tmp_path: Path) -> None:
    """Files, bytes and tenants; what is no text is named without being shown."""
    with pytest.raises(KeyFileError, match="3 files; at most 2"):
        ApiKeys(make_folder(tmp_path / "many", a="", b="", c=""), 2)
    with pytest.raises(KeyFileError, match="larger than"):
        ApiKeys(make_folder(tmp_path / "big", a="x" * (2**22 + 1)), 2)
    binary = make_folder(tmp_path / "binary")
    (binary / "a").write_bytes(b"key-of-acme\xff\xfe-number-1")
    with pytest.raises(KeyFileError, match="not UTF-8") as caught:
        ApiKeys(binary, 2)
    assert "acme" not in str(caught.value)
    (tmp_path / "nested" / "sub").mkdir(parents=True)
    with pytest.raises(KeyFileError, match="Is a directory"):
        ApiKeys(tmp_path / "nested", 2)


def test_one_key_is_never_two_tenants(tmp_path: Path) -> None:
    """Whichever files it stands in."""
    key = "key-of-acme-number-1"
    with pytest.raises(KeyFileError, match="another tenant"):
        parse_key_folder({"acme": key, "beta": key}, where="f", max_tenants=5)
    with pytest.raises(KeyFileError, match="another tenant"):
        parse_key_folder({"acme": key, "b.keys": f"beta:{digest(key)}"}, where="f", max_tenants=5)


def test_json_file_is_read_too() -> None:
    """An object from tenant to one digest or to several."""
    text = f'{{"acme": ["{digest("a")}", "{digest("b")}"], "beta": "{digest("c")}"}}'
    assert sorted({tenant for _, tenant in parse_api_keys(text, where="f", max_tenants=5)}) == ["acme", "beta"]
    with pytest.raises(KeyFileError, match="an object from tenant"):
        parse_api_keys('{"acme": 3}', where="f", max_tenants=5)


def test_all_faults_are_named_at_once() -> None:
    """Place and rule of each; never the content, which may be a key put there by mistake."""
    text = f"a b:{digest('x')}\nacme:sk-secret\nacme:{digest('y')}\nbeta:{digest('y')}\n"
    with pytest.raises(KeyFileError) as caught:
        parse_api_keys(text, where="f", max_tenants=5)
    message = str(caught.value)
    assert all(part in message for part in ("line 1", "line 2", "line 4", "another tenant"))
    assert "sk-secret" not in message


def test_salts_differ_by_tenant_and_by_key() -> None:
    """Equal on every router of a service, unrelated otherwise."""
    salt = salter(bytes(32))
    assert salt("a") == salter(bytes(32))("a")
    assert len({salt("a"), salt("b"), salter(bytes([1]) * 32)("a")}) == 3
    assert default_tenant("anything") == "default"
