"""Without a key, whatever a request calls its path, method or host: every route of a pod and of a router stays shut."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import web

from kvferry_router.app import RouterApp
from kvferry_service import auth
from tests.router.harness import running
from tests.router.test_answers_pass_through_the_router import make_pods
from tests.runtime.server.test_every_route_asks_for_the_key import KEYS, serving
from tests.service.support import error, parse, raw

OPEN = {"/healthz", "/readyz", "/metrics"}
SHUT = {400, 401, 404, 405, 414, 501}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X")

# Ways to write a path that a proxy, a cache or another parser may read as this one.
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda path: path,
    lambda path: "/" + path,
    lambda path: "//x" + path,
    lambda path: path + "/",
    lambda path: path + ".",
    lambda path: path + "%20",
    lambda path: path + "%00",
    lambda path: path + ";x=/healthz",
    lambda path: path + "?x=/healthz",
    lambda path: path + "#/healthz",
    lambda path: path.upper(),
    lambda path: "/." + path,
    lambda path: "/x/.." + path,
    lambda path: "/%2e%2e" + path,
    lambda path: "/healthz/.." + path,
    lambda path: "/healthz/%2e%2e" + path,
    lambda path: "/healthz%2f.." + path,
    lambda path: "/healthz;" + path,
    lambda path: "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:]),
    lambda path: path.replace("/", "%2f"),
    lambda path: path.replace("/", "\\"),
    lambda path: f"http://healthz{path}",
    lambda path: f"http://x/healthz/..{path}",
)
HOSTS = (
    "x/healthz",
    "x?/healthz",
    "x#/healthz",
    "healthz@x",
    "x\\healthz",
    "",
    "/healthz",
    "x:1:2",
    "..",
    "x/../healthz",
)

Serve = Callable[[Path], AbstractAsyncContextManager[tuple[int, list[tuple[str, str]]]]]


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of every route, with something in the place of a name."""
    found = [(one.method, one.resource.canonical) for one in app.router.routes() if one.resource is not None]
    return [(method, path.replace("{name}", "x")) for method, path in found if method != "HEAD"]


@asynccontextmanager
async def pod(_: Path) -> AsyncIterator[tuple[int, list[tuple[str, str]]]]:
    async with serving(KEYS) as (client, app):
        assert client._base_url is not None
        yield client._base_url.port or 0, routes_of(app)


@asynccontextmanager
async def router(folder: Path) -> AsyncIterator[tuple[int, list[tuple[str, str]]]]:
    """Its routes are those that the running one has built."""
    built: list[web.Application] = []
    build = RouterApp.build

    def keep(self: RouterApp) -> web.Application:
        built.append(build(self))
        return built[-1]

    keys = folder / "api"
    keys.write_text(f"a:{sha256(b'key').hexdigest()}\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RouterApp, "build", keep)
        flags = ("--auth", "api-keys", "--api-keys-file", str(keys))
        async with running(folder, *make_pods(), flags=flags) as made:
            yield int(made.url.rpartition(":")[2]), routes_of(built[0])


def request(method: str, target: str, *hosts: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
    return "\r\n".join(lines).encode()


async def status_of(port: int, sent: bytes) -> int:
    """Of the answer; 0 where the connection was closed without one."""
    answer = await raw(port, sent)
    return parse(answer)[0] if answer else 0


SERVERS = pytest.mark.parametrize("serve", [pod, router], ids=["pod", "router"])


@SERVERS
async def test_each_method_of_each_route(serve: Serve, tmp_path: Path) -> None:
    """Also methods that a route does not have: nobody learns which it has."""
    async with serve(tmp_path) as (port, routes):
        protected = [path for _, path in routes if not path.startswith(tuple(OPEN))]
        assert len(protected) >= 5
        for path in protected:
            for method in METHODS:
                status = await status_of(port, request(method, path, "x"))
                assert status in SHUT | {0}, (method, path, status)


@SERVERS
async def test_each_spelling_of_each_route(serve: Serve, tmp_path: Path) -> None:
    """What is open is open by the route that was found, not by how the path begins."""
    async with serve(tmp_path) as (port, routes):
        for method, path in routes:
            if path.startswith(tuple(OPEN)):
                continue
            for spell in SPELLINGS:
                status = await status_of(port, request(method, spell(path), "x"))
                assert status in SHUT, (method, spell(path), status)


@SERVERS
async def test_each_odd_host(serve: Serve, tmp_path: Path) -> None:
    """A Host header is never part of the path; two of them are refused, also on open routes and with the key."""
    async with serve(tmp_path) as (port, routes):
        for method, path in routes:
            if path.startswith(tuple(OPEN)):
                continue
            for host in HOSTS:
                status = await status_of(port, request(method, path, host))
                assert status in SHUT, (method, path, host, status)
        for path in ("/healthz", "/v1/models"):
            assert error(await raw(port, request("GET", path, "x", "y")))[0] == 400


@SERVERS
async def test_open_routes_are_open_by_one_name(serve: Serve, tmp_path: Path) -> None:
    """And for reading alone."""
    async with serve(tmp_path) as (port, _):
        for path in OPEN:
            assert await status_of(port, request("GET", path, "x")) in (200, 503)
            for method in set(METHODS) - {"GET", "HEAD"}:
                assert await status_of(port, request(method, path, "x")) in SHUT | {0}, (method, path)
            for other in (
                path + "/",
                path + ".",
                "/" + path,
                path.upper(),
                path + "/v1/models",
                path + "%2fv1%2fmodels",
            ):
                assert await status_of(port, request("GET", other, "x")) in SHUT, other


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", "bearer", "Basic {key}", "{key}", "Bearer {key}x", "Bearer x{key}", "Bearer {key},x",
        "Bearer Bearer {key}", "Bearer\u00a0{key}", "Bearer {half}", "Bearer \x00{key}", "Bearer null", "Bearer *",
    ],
)  # fmt: skip
def test_a_key_is_the_whole_key(header: str) -> None:
    """Other schemes, more, less and other bytes around it are nobody."""
    key = "0123456789abcdef"
    check = auth.bearer({key: "router"})
    assert check(f"Bearer {key}") == "router"
    assert check(header.format(key=key, half=key[:8])) is None
