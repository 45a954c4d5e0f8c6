"""Reads fields of a model's config one by one and keeps all faults, so that one message names them all."""

import math
from collections.abc import Mapping
from typing import Any

from kvferry_runtime.model.errors import ModelError

_MAX_SIZE = 2**31


class Fields:
    """A config's raw values. A fault is kept and a harmless value returned; ``finish`` raises for all of them."""

    def __init__(self, origin: str, values: Mapping[str, Any]) -> None:
        self._origin = origin
        self._values = values
        self._faults: list[str] = []

    def get(self, name: str) -> Any:
        """The raw value, ``None`` where there is none."""
        return self._values.get(name)

    def fault(self, name: str, accepted: str) -> None:
        """Keep that a field's value is not accepted."""
        given = repr(self.get(name))
        shown = given if len(given) <= 80 else given[:77] + "..."
        self._faults.append(
            f"{name} is {shown}; {accepted}" if name in self._values else f"{name} is missing; {accepted}"
        )

    def size(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """A count of at least ``low``; ``default`` where the field is absent or null."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value < _MAX_SIZE:
            self.fault(name, f"an integer from {low} is accepted")
            return default if default is not None else low
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A finite number above ``low``."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= low:
            self.fault(name, f"a number above {low:g} is accepted")
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(name, "true or false is accepted")
            return default
        return value

    def only(self, name: str, *accepted: Any) -> None:
        """Refuse every value but these; absent and null are fine."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            self.fault(name, "accepted: " + ", ".join(map(repr, accepted)) if accepted else "not supported")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            self.fault(name, f"ids of 0..{vocab_size - 1} are accepted")
            return ()
        return tuple(ids)

    def finish(self) -> None:
        """Raise ``ModelError`` with all faults, if any."""
        if self._faults:
            raise ModelError(f"{self._origin}: " + "; ".join(self._faults))
