"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kvferry_text import errors

OWNER = "kvferry"


class ModelCard(BaseModel):
    """One served name; ``max_model_len`` (tokens of prompt and answer) is an extension."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER
    max_model_len: int


class ModelList(BaseModel):
    model_config = ConfigDict(frozen=True)

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


def model_list(served_names: Sequence[str], *, created: int, max_model_len: int) -> ModelList:
    """All served names; ``created`` is Unix seconds."""
    return ModelList(
        data=tuple(ModelCard(id=name, created=created, max_model_len=max_model_len) for name in served_names)
    )


def find_model(listed: ModelList, name: str) -> ModelCard:
    """The card of one name. Raises ``ApiError`` 404 for a name that is not served."""
    for card in listed.data:
        if card.id == name:
            return card
    raise errors.model_not_found(name)
