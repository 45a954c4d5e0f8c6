"""Models of the Hugging Face hub, or of a mirror that speaks as it (``HF_ENDPOINT``).

Its own client tells what a revision is, which files it has, and who may read them (token, offline mode and endpoint as
its documentation says). The files themselves come as from any web server: a download that was cut goes on within a
file, which that client does not do from one process to the next, and all sources have the same deadlines and checks.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from kvferry_runtime.model.fetch.client import Client
from kvferry_runtime.model.fetch.errors import FetchError, TryAgainError
from kvferry_runtime.model.fetch.options import FetchOptions
from kvferry_runtime.model.fetch.store import RemoteFile
from kvferry_runtime.model.fetch.web import check_status
from kvferry_wire.fetch import FetchReason
from kvferry_wire.urls import WebUrl, parse_endpoint

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

INFO_S = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubStore:
    """One revision of one repository."""

    def __init__(self, name: str, revision: str | None, options: FetchOptions) -> None:
        self._name, self._asked = name, options.commit or revision
        self._client = Client(options.limits)
        self._listing = options.limits.fetch_listing
        self._files: dict[str, RemoteFile] = {}
        self.commit: str | None = None

    async def __aenter__(self) -> "HubStore":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    @property
    def what(self) -> str:
        revision = self.commit or self._asked
        return f"hf://{self._name}" + (f"@{revision}" if revision else "")

    @property
    def pinned(self) -> str | None:
        return self._asked if self._asked is not None and _COMMIT.fullmatch(self._asked) else None

    async def names(self) -> frozenset[str] | None:
        info = await asyncio.to_thread(self._info)
        siblings = info.siblings or []
        if info.sha is None or len(siblings) > self._listing:
            raise FetchError(f"{self.what}: the hub names no commit, or more than {self._listing} files")
        self.commit = info.sha
        self._files = {sibling.rfilename: _described(sibling) for sibling in siblings if "/" not in sibling.rfilename}
        return frozenset(self._files)

    async def stat(self, name: str) -> RemoteFile | None:
        return self._files.get(name)

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[aiohttp.ClientResponse]:
        # A commit's file never changes, and its digest is checked: no validator is needed to go on.
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._client.request("GET", self._address(file.name), headers, self._secret()) as response:
            check_status(response, f"{self.what}: {file.name}", _denied(self._name, _token() is not None))
            yield response

    def _info(self) -> "ModelInfo":
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        try:
            return HfApi(library_name="kvferry").model_info(
                self._name, revision=self._asked, files_metadata=True, timeout=INFO_S
            )
        except HfHubHTTPError as error:
            raise self._refused(error) from error
        except OfflineModeIsEnabled as error:
            raise FetchError(f"{self.what}: HF_HUB_OFFLINE is set, and the model is not here yet") from error
        except HFValidationError as error:
            raise FetchError(f"{self.what}: {error}", FetchReason.REFUSED) from error
        except Exception as error:
            # Of the HTTP library below that client, which is another one in each of its major versions.
            if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests") or isinstance(
                error, OSError
            ):
                said = " ".join(str(error).split()) or type(error).__name__
                raise TryAgainError(f"{self.what}: the hub at {_endpoint()} cannot be reached ({said})") from error
            raise

    def _refused(self, error: Exception) -> FetchError | TryAgainError:
        """The hub's answer in words that a person can act on."""
        from huggingface_hub import errors as hub_errors

        response = getattr(error, "response", None)
        status, token = getattr(response, "status_code", 0), _token() is not None
        if isinstance(error, hub_errors.RevisionNotFoundError):
            told = f"the hub has {self._name}, but no revision {self._asked!r} of it"
            return FetchError(f"{self.what}: {told}", FetchReason.MISSING)
        if isinstance(error, hub_errors.GatedRepoError):
            return FetchError(f"{self.what}: {_denied(self._name, token)}", FetchReason.DENIED)
        if isinstance(error, hub_errors.DisabledRepoError):
            return FetchError(f"{self.what}: the hub has disabled it", FetchReason.DENIED)
        if isinstance(error, hub_errors.RepositoryNotFoundError):
            told = (
                "the hub has no such model, or the token may not see it: check the name"
                if token
                else "the hub has no public model of this name; one that is private needs a token that may read it:"
                " spec.model.tokenSecretRef, or HF_TOKEN on one machine"
            )
            return FetchError(f"{self.what}: {told} (status {status})", FetchReason.MISSING)
        if status == 401:
            return FetchError(
                f"{self.what}: the hub refuses the token (status 401): make a new one", FetchReason.DENIED
            )
        if status == 403:
            return FetchError(f"{self.what}: {_denied(self._name, token)} (status 403)", FetchReason.DENIED)
        if status == 404:
            return FetchError(f"{self.what}: {_endpoint()} knows no such model (status 404)", FetchReason.MISSING)
        if status == 429 or status >= 500:
            return TryAgainError(f"{self.what}: the hub at {_endpoint()} answers with status {status}")
        said = " ".join(str(error).split())[:300]
        return FetchError(f"{self.what}: the hub answers with status {status}: {said}")

    def _address(self, name: str) -> WebUrl:
        split = urlsplit(_endpoint())
        path = f"{split.path.rstrip('/')}/{quote(self._name)}/resolve/{quote(self.commit or '', safe='')}/{quote(name)}"
        try:
            return msgspec.structs.replace(parse_endpoint(f"{split.scheme}://{split.netloc}"), path=path)
        except ValueError as error:
            raise FetchError(f"HF_ENDPOINT: {error}", FetchReason.REFUSED) from None

    def _secret(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"} if (token := _token()) else {}


def _described(sibling: "RepoSibling") -> RemoteFile:
    """A file as the hub lists it: large ones have their SHA-256, the others are objects of git."""
    lfs = sibling.lfs
    size = sibling.size if lfs is None else lfs["size"]
    sha256 = None if lfs is None else str(lfs["sha256"])
    blob = sibling.blob_id if lfs is None else None
    return RemoteFile(name=sibling.rfilename, size=size, validator=sha256 or blob or "", sha256=sha256, git_sha1=blob)


def _denied(name: str, token: bool) -> str:
    if token:
        return (
            f"access denied: ask for it at {_endpoint()}/{name} as the owner of the token, whose rights must include it"
        )
    return (
        f"access denied: ask for it at {_endpoint()}/{name}, then give a token: spec.model.tokenSecretRef, or"
        " HF_TOKEN on one machine"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def _token() -> str | None:
    """The token that the hub's own client would send."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
