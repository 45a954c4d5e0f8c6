"""Every route needs the key, except the three declared open."""

import pytest

from tests.service.support import error, parse, raw, request, serving

OPEN = {"/healthz", "/readyz", "/metrics"}


async def test_each_registered_route_but_the_open_ones_refuses_a_caller_without_key() -> None:
    """Whatever is registered, an unauthenticated call gets 401 unless the route is one of the three open ones."""
    async with serving() as (port, _, app):
        routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]
        assert ("POST", "/echo") in routes
        for method, path in routes:
            if method == "HEAD":
                continue
            answer = await raw(port, request(method, path, token=""))
            assert (parse(answer)[0] == 401) == (path not in OPEN), path


@pytest.mark.parametrize("token", ["", "wrong", "t" * 31, "t" * 33, "\u00fc"])
async def test_a_wrong_key_is_401_in_openai_shape(token: str) -> None:
    """A missing, wrong, cut or non-ASCII key gets the same answer."""
    async with serving() as (port, _, _app):
        status, shown = error(await raw(port, request("GET", "/hang", token=token)))
        assert (status, shown["code"]) == (401, "invalid_api_key")


async def test_an_unknown_route_says_404_only_to_a_caller_with_the_key() -> None:
    """Routes cannot be probed without a key; with it they answer 404 and 405 in OpenAI's shape."""
    async with serving() as (port, _, _app):
        assert error(await raw(port, request("GET", "/nope", token="")))[0] == 401
        assert error(await raw(port, request("GET", "/nope")))[0] == 404
        answer = await raw(port, request("DELETE", "/echo"))
        assert error(answer)[0] == 405
        assert parse(answer)[1]["allow"] == "POST"


async def test_not_ready_is_503_with_the_reason() -> None:
    """``/readyz`` says why; ``/healthz`` and ``/metrics`` answer without a key."""
    async with serving() as (port, _, _app):
        status, _, body = parse(await raw(port, request("GET", "/readyz", token="")))
        assert status == 503
        assert b"engine: loading" in body
        assert parse(await raw(port, request("GET", "/healthz", token="")))[0] == 200
        status, _, body = parse(await raw(port, request("GET", "/metrics", token="")))
        assert status == 200
        assert b"process_resident_memory_bytes" in body
        assert b"_created" not in body
