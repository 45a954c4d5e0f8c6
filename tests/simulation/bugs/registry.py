"""How a known bug is planted into a core, for as long as a context lasts. Nothing in the product knows of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug, in what weather it shows, and as which kinds of violation.

    ``report``: the public report of another system that it stands for, ``owner/repository#number``, if one fits.
    """

    name: str
    profile: str
    shows_as: frozenset[str]
    planted: Callable[[], AbstractContextManager[None]]
    report: str = ""


BUGS: list[Bug] = []

Plant = Callable[[], Iterator[None]]


def bug(profile: str, *shows_as: str, report: str = "") -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS.append(Bug(plant.__name__, profile, frozenset(shows_as), contextmanager(plant), report))
        return plant

    return register


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return patch.object(owner, name, make(getattr(owner, name)))
