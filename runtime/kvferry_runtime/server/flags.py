"""Flags as a table, and a parser that reports every bad one together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kvferry_runtime.engine.sizing import parse_bytes


class Reader:
    """Turns a flag's text into its value; ``accepted`` is what its help and its faults say."""

    def __init__(self, read: Callable[[str], Any], accepted: str) -> None:
        self.read = read
        self.accepted = accepted


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. ``reader`` is ``None`` for a switch; a ``default`` of ``None`` makes ``--model`` required."""

    name: str
    reader: Reader | None
    default: Any
    help: str
    unset: Any = None  # a default that means "not given" and is not shown

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


class FlagError(ValueError):
    """Every bad flag of a command line."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


def text() -> Reader:
    def read(given: str) -> str:
        if not given:
            raise ValueError
        return given

    return Reader(read, "a non-empty text")


def path() -> Reader:
    return Reader(lambda given: Path(given).expanduser() if given else text().read(given), "a path")


def address() -> Reader:
    """Nothing that a resolver would have to be asked for: sockets of ZMQ bind addresses only."""

    def read(given: str) -> str:
        return given if given == "localhost" else str(ip_address(given))

    return Reader(read, "an IPv4 or IPv6 address or localhost")


def choice(*names: str) -> Reader:
    def read(given: str) -> str:
        if given not in names:
            raise ValueError
        return given

    return Reader(read, "one of " + ", ".join(names))


def number(low: int, high: int) -> Reader:
    def read(given: str) -> int:
        value = int(given, 10)
        if not low <= value <= high:
            raise ValueError
        return value

    return Reader(read, f"a whole number from {low} to {high}")


def seconds(low: float, high: float) -> Reader:
    def read(given: str) -> float:
        value = float(given)
        if not low <= value <= high:  # also refuses NaN
            raise ValueError
        return value

    return Reader(read, f"seconds from {low:g} to {high:g}")


def size() -> Reader:
    def read(given: str) -> int:
        value = parse_bytes(given)
        if value < 1:
            raise ValueError
        return value

    return Reader(read, "bytes, or a number with KiB, MiB, GiB, KB, MB or GB")


def parse_flags(argv: Sequence[str], flags: Sequence[Flag]) -> tuple[dict[str, Any], list[str]]:
    """Read a command line: values by key (defaults filled in), and all faults. Keys at fault hold their default."""
    known = {flag.name: flag for flag in flags}
    values = {flag.key: flag.default for flag in flags}
    faults: list[str] = []
    seen: set[str] = set()
    index = 0
    while index < len(argv):
        name, equals, given = argv[index].partition("=")
        index += 1
        flag = known.get(name)
        if flag is None:
            faults.append(f"{name}: not a flag; --help lists what is accepted")
            # What follows an unknown flag is most likely its value.
            index += not equals and index < len(argv) and not argv[index].startswith("--")
            continue
        if name in seen:
            faults.append(f"{name}: given more than once")
        seen.add(name)
        if flag.reader is None:
            values[flag.key] = True
            if equals:
                faults.append(f"{name}: takes no value")
            continue
        if not equals:
            if index >= len(argv) or argv[index].startswith("--"):
                faults.append(f"{name}: no value given; {flag.reader.accepted} is accepted")
                continue
            given = argv[index]
            index += 1
        try:
            values[flag.key] = flag.reader.read(given)
        except (ValueError, OverflowError):
            faults.append(f"{name}: {given[:80]!r} given; {flag.reader.accepted} is accepted")
    if "--model" in known and values["model"] is None and "--model" not in seen:
        faults.append("--model: not given; " + known["--model"].help + " is accepted")
    return values, faults


def help_text(prog: str, purpose: str, flags: Sequence[Flag]) -> str:
    """Every flag with what it accepts, what it means and its default."""
    lines = [f"usage: {prog} MODEL [flags]", "", purpose, ""]
    for flag in flags:
        accepted = "" if flag.reader is None else f"  ({flag.reader.accepted})"
        default = "" if flag.default in (None, "", False) or flag.unset is not None else f" [default: {flag.default}]"
        lines += [f"  {flag.name}{accepted}", f"      {flag.help}{default}"]
    return "\n".join(lines)
