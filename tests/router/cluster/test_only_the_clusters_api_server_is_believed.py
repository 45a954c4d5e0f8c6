"""TLS to the API server: the mounted authority decides, and is read again when the kubelet exchanges it."""

from pathlib import Path

import pytest

from .certificates import make_authority, server_context
from .fake_api import FakeApi
from .following import following
from .objects import make_endpoint, make_slice

pytestmark = pytest.mark.usefixtures("open_files")


async def test_an_api_server_of_another_authority_never_sees_the_token(tmp_path: Path) -> None:
    """The connection fails before anything is asked; with the right authority in place it goes on by itself."""
    ours, other = make_authority(tmp_path, "ours"), make_authority(tmp_path, "other")
    (tmp_path / "ca.crt").write_bytes(ours.read_bytes())
    api = FakeApi(tmp_path)
    api.put(make_slice("d-1", make_endpoint("d1", "10.0.0.1")))
    await api.start(server_context(tmp_path, other))
    async with following(api) as found:
        await found.until(lambda: found.failures("connection") >= 2)
        assert (api.asked, found.told) == ([], [])
        (tmp_path / "ca.crt").write_bytes(other.read_bytes())
        await found.until(lambda: found.pods() == {"d1": ""})


async def test_an_authority_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """And nothing is asked without one."""
    authority = make_authority(tmp_path, "ours")
    (tmp_path / "ca.crt").write_text("no certificate")
    api = FakeApi(tmp_path)
    await api.start(server_context(tmp_path, authority))
    async with following(api) as found:
        await found.until(lambda: found.failures("credentials") >= 2)
        assert api.asked == []
