"""Logs: one line per event, as JSON or for people, with the ids of the request it belongs to.

``configure`` is called once, by a process's main. Prompt text and token ids are never given to a log call; keys that
are registered with ``redact`` and bearer tokens are blanked out should they ever get into a line.
"""

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

_BEARER = re.compile(r"(?i)\bbearer\s+[^\s\"']+")
_REDACTED = "[redacted]"
_MESSAGE_CHARS = 4000
_LIBRARY_LEVELS = {"aiohttp": logging.WARNING, "asyncio": logging.WARNING}

_request: ContextVar[tuple[str, str]] = ContextVar("kvferry_request", default=("", ""))


class _Secrets:
    def __init__(self) -> None:
        self._values: list[str] = []

    def add(self, values: Iterable[str]) -> None:
        self._values += [value for value in values if len(value) >= 8 and value not in self._values]

    def blank(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, _REDACTED)
        return _BEARER.sub(f"Bearer {_REDACTED}", text)


_secrets = _Secrets()


def redact(secrets: Iterable[str]) -> None:
    """Never write these strings (at least 8 characters long) into a log line."""
    _secrets.add(secrets)


def bind_request(request_id: str = "", internal_id: str = "") -> None:
    """Give all later lines of this task (and of tasks it starts) these ids."""
    _request.set((request_id, internal_id))


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Structured fields of a line: ``log.info("pull done", extra=fields(blocks=3))``."""
    return {"kvferry": values}


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def _parts(self, record: logging.LogRecord) -> tuple[str, dict[str, object]]:
        values: dict[str, object] = {}
        request_id, internal_id = _request.get()
        if request_id:
            values["request_id"] = request_id
        if internal_id:
            values["internal_id"] = internal_id
        values |= record.__dict__.get("kvferry", {})
        message = record.getMessage()
        if len(message) > _MESSAGE_CHARS:
            message = message[:_MESSAGE_CHARS] + "..."
        return message, values

    def _error(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return "".join(traceback.format_exception(record.exc_info[1])).rstrip()


class JsonFormatter(_Formatter):
    """One JSON object per line: time (UTC), level, process, logger, message, ids, fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        message, values = self._parts(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": message,
        }
        line |= values
        if error := self._error(record):
            line["error"] = error
        return _secrets.blank(json.dumps(line, ensure_ascii=False, default=str))


class HumanFormatter(_Formatter):
    """Time, level, process, message, then ``name=value`` fields; a traceback on the lines after it."""

    def format(self, record: logging.LogRecord) -> str:
        message, values = self._parts(record)
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{clock} {record.levelname:<7} {self._process}: {message}"
        if values:
            line += "  " + " ".join(f"{name}={value}" for name, value in values.items())
        if error := self._error(record):
            line += "\n" + error
        # One event is one line: what a peer sent must not start a forged one.
        return _secrets.blank(line if error else line.replace("\n", "\\n").replace("\r", "\\r"))


def configure(
    process: str, *, json_lines: bool | None = None, level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Set up the root logger of this process.

    Args:
        process: the name shown in each line.
        json_lines: JSON or human-readable lines; ``None`` chooses JSON when ``stream`` is not a terminal.
        level: a name of ``logging``.
        stream: default standard error.
    """
    target = stream if stream is not None else sys.stderr
    if json_lines is None:
        json_lines = not target.isatty()
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter(process) if json_lines else HumanFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name, least in _LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    logging.captureWarnings(True)
