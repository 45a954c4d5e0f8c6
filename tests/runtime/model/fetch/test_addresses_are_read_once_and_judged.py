"""Addresses of models: one strict grammar; link-local and metadata addresses are never connected to."""

import socket
from pathlib import Path

import msgspec
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from kvferry_runtime.model.fetch import FetchError, client, get
from kvferry_runtime.model.fetch.client import Client, Guard
from kvferry_wire.fetch import FetchReason
from kvferry_wire.urls import Zone, parse_endpoint, parse_url, redirected, zone_of
from tests.runtime.model.fetch.conftest import LIMITS, QUIET
from tests.runtime.model.fetch.servers import FileServer, serve_folder

GOOD = {
    "https://models.example.com/llama/": "https://models.example.com/llama/",
    "http://models.example.com:8080/a%20b/x.gguf": "http://models.example.com:8080/a%20b/x.gguf",
    "HTTPS://Models.Example.com:443/x/": "https://models.example.com/x/",
    "http://[2001:DB8::1]:80/x/": "http://[2001:db8::1]/x/",
    "http://10.0.0.1/x/": "http://10.0.0.1/x/",
    f"https://h/x.gguf#sha256={'a' * 64}": "https://h/x.gguf",
}

BAD = {
    "ftp://h/x/": "not an address",
    "file:///etc/x.gguf": "not an address",
    "data:text/plain,x": "not an address",
    "https://h/x": "neither a folder",
    "https://user:pass@h/x/": "credentials do not belong",
    "https://h@evil.example/x/": "credentials do not belong",
    "https://h\\@evil.example/x/": "not an address",
    "https://h/x/?token=secret": "a query is not accepted",
    "https://h/../x/": "holds . or ..",
    "https://h/%2e%2E/x/": "holds . or ..",
    "https://h/a%00/": "broken or refused escape",
    "https://h/a%5cb/": "broken or refused escape",
    "https://h/a%2/": "broken or refused escape",
    "https://h/a b/": "not an address",
    "https://h/a\n/": "not an address",
    "https://hôte/x/": "not an address",
    "https:///x/": "not an address",
    "https://h:0/x/": "port 0",
    "https://h:99999/x/": "port 99999",
    "https://h:/x/": "no host with an optional port",
    "http://2130706433/x/": "four decimal numbers",
    "http://0x7f.0.0.1/x/": "four decimal numbers",
    "http://127.1/x/": "four decimal numbers",
    "http://010.0.0.1/x/": "four decimal numbers",
    "http://[::1%25eth0]/x/": "no host",
    "http://[::g]/x/": "no host",
    "http://h../x/": "no host",
    "https://h/x.gguf#sha256=abc": "64 hex digits",
    "https://h/x/#part": "64 hex digits",
    f"https://h/x/#sha256={'a' * 64}": "SHA256SUMS",
    "https://h/" + "a" * 1024 + "/": "not an address",
}


@pytest.mark.parametrize("text", GOOD)
def test_an_address_is_kept_in_one_form(text: str) -> None:
    """Scheme and host in lower case, no default port; it is shown without a query."""
    assert str(parse_url(text)) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_other_text_is_refused_in_words(text: str) -> None:
    """Each says what is wrong; no other reading of it is tried."""
    with pytest.raises(ValueError, match=BAD[text]):
        parse_url(text)


ZONES = {
    "127.0.0.1": Zone.LOOPBACK,
    "::1": Zone.LOOPBACK,
    "::ffff:127.0.0.1": Zone.LOOPBACK,
    "::7f00:1": Zone.LOOPBACK,
    "10.1.2.3": Zone.PRIVATE,
    "192.168.1.1": Zone.PRIVATE,
    "100.64.0.1": Zone.PRIVATE,
    "fd00::1": Zone.PRIVATE,
    "::ffff:10.0.0.1": Zone.PRIVATE,
    "64:ff9b::a00:1": Zone.PRIVATE,
    "8.8.8.8": Zone.PUBLIC,
    "2606:4700::1111": Zone.PUBLIC,
    "64:ff9b::808:808": Zone.PUBLIC,
}
NEVER = (
    "169.254.169.254",
    "169.254.0.1",
    "fe80::1",
    "fe80::1%eth0",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "fd00:ec2::254",
    "100.100.100.200",
    "168.63.129.16",
    "0.0.0.0",
    "0.1.2.3",
    "::",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
    "240.0.0.1",
)


@pytest.mark.parametrize("address", ZONES)
def test_addresses_have_a_zone(address: str) -> None:
    """Also those that stand for an IPv4 address in another form."""
    assert zone_of(address) == ZONES[address]


@pytest.mark.parametrize("address", NEVER)
def test_some_addresses_are_never_asked(address: str) -> None:
    """Metadata services, link-local and what no server has, in every form."""
    with pytest.raises(ValueError, match=r"never asked|no address of a server|reserved"):
        zone_of(address)


@pytest.mark.parametrize("address", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "100.100.100.200"])
def test_a_literal_metadata_address_gets_no_packet(address: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before any socket is made."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a socket was connected"))
    with pytest.raises(FetchError, match="never asked") as caught:
        get(f"http://{address}/latest/", root, QUIET)
    assert caught.value.reason == FetchReason.REFUSED


class Names(AbstractResolver):
    """A resolver whose answers a test gives, one after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.answers.pop(0)
        return [ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None:
        pass


async def test_a_name_that_turns_to_the_metadata_service_is_refused(server: FileServer) -> None:
    """Each connection goes to an address that was judged for it: resolving differently later gains nothing."""
    port = server.url.rpartition(":")[2]
    server.files["/x/a.gguf"] = b"x"
    server.headers["/x/a.gguf"] = {"Connection": "close"}
    url = parse_url(f"http://models.test:{port}/x/a.gguf")
    async with Client(LIMITS, resolver=Names("127.0.0.1", "169.254.169.254")) as asking:
        async with asking.request("GET", url, {}) as response:
            assert response.status == 200
        with pytest.raises(FetchError, match=r"169\.254\.169\.254 is a link-local"):
            async with asking.request("GET", url, {}):
                pass
    assert len(server.seen) == 1
    assert server.seen[0].headers["Host"] == f"models.test:{port}"


def test_what_answers_from_afar_leads_nowhere_near() -> None:
    """A public server cannot send the fetch to a private address or to this machine; a private one cannot either."""
    guard = Guard()
    guard.admit("models.example.com", ["8.8.8.8"])
    guard.admit("cdn.example.com", ["1.1.1.1"])
    with pytest.raises(FetchError, match="a public address led to a private one"):
        guard.admit("intranet", ["10.0.0.1"])
    with pytest.raises(FetchError, match="a public address led to a loopback one"):
        guard.admit("mixed.example.com", ["1.1.1.1", "127.0.0.1"])
    near = Guard()
    near.admit("mirror", ["10.0.0.1"])
    near.admit("cdn.example.com", ["1.1.1.1"])
    with pytest.raises(FetchError, match="a private address led to a loopback one"):
        near.admit("localhost", ["127.0.0.1"])


def test_a_redirect_is_followed_without_the_token(
    server: FileServer, other: FileServer, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may lie elsewhere; credentials go to the asked host alone."""
    address = serve_folder(server, model)
    serve_folder(other, model)
    weights = [path for path in server.files if path.endswith(".safetensors")]
    for path in weights:
        server.redirects[path] = f"{other.url}{path}?signature=abc"
        del server.files[path]
    server.token = "t0ken"
    monkeypatch.setattr("kvferry_runtime.model.fetch.web._secret", lambda *_: {"Authorization": "Bearer t0ken"})
    get(address, root, QUIET)
    assert {seen.path.partition("?")[2] for seen in other.seen} == {"signature=abc"}
    assert not [seen for seen in other.seen if "Authorization" in seen.headers]
    assert [seen for seen in server.seen if "Authorization" in seen.headers]


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("http://169.254.169.254/latest/meta-data/", "never asked"),
        ("http://[::ffff:a9fe:a9fe]/", "never asked"),
        ("file:///etc/passwd", "not followed"),
        ("http://user:pass@127.0.0.1/", "not followed"),
        ("http://127.1/", "not followed"),
        ("\\\\evil\\x", "not followed"),
        ("/m/config.json", "more than 5 redirects"),
    ],
)
def test_a_redirect_into_the_dark_is_not_followed(
    server: FileServer, model: Path, root: Path, location: str, said: str
) -> None:
    """Metadata, other schemes, odd spellings, loops."""
    address = serve_folder(server, model)
    server.redirects["/m/config.json"] = location
    with pytest.raises(FetchError, match=said):
        get(address, root, QUIET)


def test_encryption_is_not_given_up_on_the_way() -> None:
    """From https a redirect leads to https alone, relative ones stay where they are."""
    url = parse_url("https://h/x/")
    assert str(redirected(url, "/y?z=1")) == "https://h/y"
    assert redirected(url, "https://cdn/y?z=1").query == "z=1"
    with pytest.raises(ValueError, match="not encrypted"):
        redirected(url, "http://h/y")
    with pytest.raises(ValueError, match="no address"):
        redirected(url, "https://h/" + "a" * 9000)


@pytest.mark.parametrize("text", ["http://h/x", "http://h?x", "https://u@h", "minio:9000", "https://169.1"])
def test_an_endpoint_is_a_host_and_a_port(text: str) -> None:
    """Nothing behind it, no credentials, no half address."""
    assert str(parse_endpoint("http://minio.store.svc:9000")) == "http://minio.store.svc:9000/"
    with pytest.raises(ValueError, match="endpoint"):
        parse_endpoint(text)


def test_a_token_is_sent_over_https_alone(server: FileServer, model: Path, root: Path, tmp_path: Path) -> None:
    """It is read from a file, and never shown."""
    address = serve_folder(server, model)
    (tmp_path / "token").write_text("s3cret\n")
    options = msgspec.structs.replace(QUIET, token_file=tmp_path / "token")
    with pytest.raises(FetchError, match="over https alone") as caught:
        get(address, root, options)
    assert "s3cret" not in str(caught.value)
    assert not server.seen
    (tmp_path / "token").write_text("two\nlines")
    with pytest.raises(FetchError, match="no token"):
        get(address.replace("http:", "https:"), root, options)
    with pytest.raises(FetchError, match="No such file"):
        get(address, root, msgspec.structs.replace(options, token_file=tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), (None, None), ("-1", None), ("soon", None), ("9" * 9, None), ("٣", None)]
)
def test_only_seconds_are_a_wait(text: str | None, seconds: float | None) -> None:
    """What else a server writes there is not waited for."""
    assert client.retry_after(text) == seconds
