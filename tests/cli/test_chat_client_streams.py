"""The chat client against a scripted endpoint: text as it comes, and every way to fail told plainly."""

import http.server
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from kvferry_cli.chat_client import ChatClient, ChatError
from kvferry_cli.main import main

Script = Callable[[http.server.BaseHTTPRequestHandler], None]


def sse(*events: str) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode()


def delta(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)


def answer(status: int, body: bytes, **headers: str) -> Script:
    def script(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return script


class Endpoint:
    """An HTTP server that plays one script per POST and lists one model."""

    def __init__(self) -> None:
        self.script: Script = answer(200, b"")
        self.requests: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())(self)

            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                outer.script(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


def ask(endpoint: Endpoint, timeout_s: float = 5.0) -> tuple[str, str]:
    client = ChatClient(endpoint.url, "secret", timeout_s)
    text = "".join(client.stream({"model": "tiny", "messages": []}))
    return text, client.summary


def test_text_is_joined_and_the_end_is_told(endpoint: Endpoint) -> None:
    """Comments are skipped; path, finish reason and counts are kept for the user."""
    body = b": comment\n\n" + sse(delta("Hé"), delta("llo"), delta("", "stop"), USAGE, "[DONE]")
    endpoint.script = answer(200, body, x_kvferry_path="disaggregated")
    assert ask(endpoint) == ("Héllo", "disaggregated, stop, 7 prompt tokens (4 cached), 2 written")
    assert endpoint.requests[0]["stream"] is True
    assert endpoint.headers[0]["authorization"] == "Bearer secret"


def test_a_stream_without_its_end_is_no_answer(endpoint: Endpoint) -> None:
    """Text without [DONE] broke off, whatever the connection says."""
    endpoint.script = answer(200, sse(delta("half")))
    with pytest.raises(ChatError, match="broke off before its end"):
        ask(endpoint)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (answer(429, b'{"error": {"message": "too busy"}}'), "refused with 429: too busy"),
        (answer(502, b"<html>"), "refused with 502: Bad Gateway"),
        (answer(200, sse(delta("x"), '{"error": {"message": "decode died"}}')), "decode died"),
        (answer(200, sse("nonsense")), "no JSON object"),
    ],
)
def test_failures_are_told_in_the_endpoints_words(endpoint: Endpoint, script: Script, expected: str) -> None:
    """Refusals, in-band errors and nonsense."""
    endpoint.script = script
    with pytest.raises(ChatError, match=expected):
        ask(endpoint)


def test_silence_ends_at_the_deadline(endpoint: Endpoint) -> None:
    """A client never waits for ever."""
    release = threading.Event()

    def silent(handler: http.server.BaseHTTPRequestHandler) -> None:
        answer(200, sse(delta("x")))(handler)
        handler.wfile.flush()
        release.wait(5)

    endpoint.script = silent
    with pytest.raises(ChatError, match=r"silent for 0\.3 s"):
        ask(endpoint, timeout_s=0.3)
    release.set()


def test_one_shot_prints_the_answer(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """`--message` asks once; the model is the one that the endpoint lists; options reach the request."""
    endpoint.script = answer(200, sse(delta("Hi"), "[DONE]"))
    options = ["--max-tokens", "5", "--temperature", "0", "--seed", "3", "--system", "Be brief."]
    assert main(["chat", "--url", endpoint.url + "/v1", "-m", "Hello", *options]) == 0
    assert capsys.readouterr().out == "Hi\n"
    asked = endpoint.requests[0]
    assert asked["model"] == "tiny"
    assert (asked["max_tokens"], asked["temperature"], asked["seed"]) == (5, 0.0, 3)
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_a_dialogue_remembers_what_was_said(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question carries the conversation; /new forgets it; a failed exchange is not remembered."""
    lines = iter(["one", "", "fail", "two", "/new", "three"])

    def read(_: str) -> str:
        try:
            line = next(lines)
        except StopIteration:
            raise EOFError from None
        endpoint.script = answer(500, b"") if line == "fail" else answer(200, sse(delta("ok"), "[DONE]"))
        return line

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--url", endpoint.url]) == 0
    said = [[message["content"] for message in asked["messages"]] for asked in endpoint.requests]  # type: ignore[attr-defined]  # JSON
    assert said == [["one"], ["one", "ok", "fail"], ["one", "ok", "two"], ["three"]]
    assert "refused with 500" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-m", "\udcff"], ["-m", "-"], []])
def test_text_that_is_not_utf_8_is_one_line(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """From the command line, from a pipe at once, and from a pipe line by line."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", "--url", endpoint.url, *arguments]) == 1
    assert "not UTF-8" in capsys.readouterr().err
    assert not endpoint.requests


def test_a_pipe_gets_the_answers_alone(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is for terminals."""
    endpoint.script = answer(200, sse(delta("Hi"), "[DONE]"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--url", endpoint.url]) == 0
    assert capsys.readouterr().out == "Hi\n"
