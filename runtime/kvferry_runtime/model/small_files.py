"""Files beside the weights: read whole, so never larger than they have reason to be."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvferry_runtime.model.errors import ModelError


def read_small(path: Path, most: int) -> bytes:
    """A file's content.

    Raises:
        ModelError: it cannot be read, or holds more than ``most`` bytes; no more are read, whatever it grows to.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most + 1) if size <= most else b""
            if max(size, len(content)) > most:
                raise ModelError(f"{path}: {size} bytes; at most {most} are accepted")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    return content


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's members, for ``object_pairs_hook``. Raises ``ValueError`` where one name appears twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result
