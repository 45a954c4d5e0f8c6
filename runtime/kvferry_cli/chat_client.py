"""A small streaming client of the OpenAI chat API: one connection per request, nothing beyond the standard library."""

import http.client
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

MAX_LINE_BYTES = 8 * 2**20
MAX_ERROR_BYTES = 64 * 2**10
DONE = b"[DONE]"


class ChatError(Exception):
    """The endpoint could not be reached, refused, or broke off; the message is fit for a terminal."""


class ChatClient:
    """Talks to one endpoint. ``summary`` tells of the last finished answer: path, finish reason, token counts."""

    def __init__(self, endpoint: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(endpoint)
        self._endpoint = endpoint
        self._host, self._port = parts.hostname or "", parts.port
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.summary = ""

    def first_model(self) -> str:
        """The first model that the endpoint lists. Raises ``ChatError``."""
        connection = self._connect()
        try:
            response = self._request(connection, "GET", "/v1/models", None)
            models = msgspec.json.decode(response.read(MAX_ERROR_BYTES))
            return str(models["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise ChatError(f"{self._endpoint}/v1/models lists no model") from None
        finally:
            connection.close()

    def stream(self, request: Mapping[str, Any]) -> Iterator[str]:
        """Ask, and give the answer's text as it comes.

        Args:
            request: the body of a chat completion, without ``stream``.

        Raises:
            ChatError: also for a stream that ends without ``[DONE]``: its text is not a whole answer.
        """
        try:
            body = msgspec.json.encode({**request, "stream": True, "stream_options": {"include_usage": True}})
        except UnicodeEncodeError:  # bytes of the command line or the terminal that Python could not decode
            raise ChatError("what was asked is not UTF-8") from None
        connection = self._connect()
        try:
            response = self._request(connection, "POST", "/v1/chat/completions", body)
            path = response.getheader("x-kvferry-path") or "path unknown"
            finish = ""
            usage: dict[str, Any] = {}
            for data in self._events(response):
                if data == DONE:
                    self.summary = _summary(path, finish, usage)
                    return
                event = _decoded(data)
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    finish = choice.get("finish_reason") or finish
                    if text := (choice.get("delta") or {}).get("content"):
                        yield str(text)
            raise ChatError("the answer broke off before its end")
        finally:
            connection.close()  # an unfinished answer is cancelled by this

    def _connect(self) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=self._timeout_s)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
        except TimeoutError:
            raise ChatError(f"{self._endpoint} gave no answer within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self._endpoint} cannot be reached: {_reason(error)}") from None
        except ValueError as error:  # a host name, or an API key, that cannot be put into a request
            raise ChatError(f"{self._endpoint} cannot be asked: {error}") from None
        if response.status != 200:
            raise ChatError(f"{self._endpoint} refused with {response.status}: {_message(response)}")
        return response

    def _events(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The data of each event. Comments and other fields are skipped."""
        try:
            while line := response.readline(MAX_LINE_BYTES):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        except TimeoutError:
            raise ChatError(f"{self._endpoint} was silent for {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke: {_reason(error)}") from None


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ChatError("the endpoint sent an event that is no JSON object") from None
    if "error" in event:
        error = event["error"]
        raise ChatError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    return event


def _message(response: http.client.HTTPResponse) -> str:
    """The reason in an error's body, made fit for a terminal."""
    body = response.read(MAX_ERROR_BYTES)
    try:
        error = msgspec.json.decode(body, type=dict[str, Any])["error"]
        text = str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = response.reason
    return "".join(char if char.isprintable() else " " for char in text)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _summary(path: str, finish: str, usage: Mapping[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    asked, written = usage.get("prompt_tokens", "?"), usage.get("completion_tokens", "?")
    counts = f"{asked} prompt tokens ({cached} cached), {written} written"
    return f"{path}, {finish or 'no finish reason'}, {counts}"
