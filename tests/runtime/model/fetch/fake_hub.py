"""A hub of one's own: the routes that its client and our fetch ask, over a `FileServer`."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.runtime.model.fetch.servers import FileServer, Seen, running

COMMIT = "1" * 40
LARGE = 1000  # bytes from which on a file is not an object of git


@dataclass
class FakeHub:
    """Repositories by name, each with its commits; ``token`` opens what is not public."""

    files: FileServer
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repository -> commit -> files
    branches: dict[str, dict[str, str]] = field(default_factory=dict)  # repository -> branch or tag -> commit
    token: str | None = None
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    down: int = 0  # status of every answer

    def push(self, repository: str, folder: Path, commit: str = COMMIT, branch: str = "main") -> None:
        """A commit with a folder's files."""
        content = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.commits.setdefault(repository, {})[commit] = content
        self.branches.setdefault(repository, {})[branch] = commit

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        self.files.seen.append(Seen(request.method, request.raw_path, dict(request.headers)))
        if self.down:
            return web.Response(status=self.down)
        authorized = self.token is not None and request.headers.get("Authorization") == f"Bearer {self.token}"
        if request.headers.get("Authorization") and not authorized:
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return web.Response(status=401, headers=headers)
        if parts[:2] == ["api", "models"]:
            revision = parts[5] if len(parts) > 5 else "main"
            return self._info("/".join(parts[2:4]), revision.replace("%2F", "/"), authorized)
        if parts[2:3] == ["resolve"]:
            return await self._file(request, "/".join(parts[:2]), parts[3], parts[4], authorized)
        return await self.files.handle(request)

    def _info(self, repository: str, revision: str, authorized: bool) -> web.StreamResponse:
        if repository not in self.commits or (repository in self.private and not authorized):
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return web.Response(status=404 if authorized else 401, headers=headers)
        commit = self.branches[repository].get(revision, revision)
        if commit not in self.commits[repository]:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [_sibling(name, content) for name, content in self.commits[repository][commit].items()]
        return web.json_response({"id": repository, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0})

    async def _file(
        self, request: web.Request, repository: str, commit: str, name: str, authorized: bool
    ) -> web.StreamResponse:
        if repository in self.gated and not authorized:
            return web.Response(status=401, headers={"X-Error-Code": "GatedRepo"})
        content = self.commits[repository][commit].get(name)
        if content is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        path = f"/cdn/{commit}/{name}"
        self.files.files[path] = content
        if len(content) >= LARGE:
            return web.Response(status=302, headers={"Location": f"{self.files.url}{path}?Signature=x"})
        return web.Response(body=content)


def _sibling(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    described: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 130}
    return described


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub without models."""
    hub = FakeHub(FileServer())

    def started(url: str) -> None:
        hub.files.url = url

    with running(hub.handle, started):
        yield hub
