"""API keys: digests only, read again on change, and a salt per tenant that the client cannot choose."""

from hashlib import sha256
from pathlib import Path

import pytest

from kvferry_router.tenants import ApiKeys, KeyFileError, default_tenant, parse_api_keys, salter


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
