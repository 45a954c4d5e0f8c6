"""From the name of a model to who gets it."""

import re
from pathlib import Path
from urllib.parse import quote

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.fetch import demo
from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_runtime.model.fetch.options import Fetched, FetchOptions
from kvferry_runtime.model.fetch.place import LATEST, slug
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.toy_spec import is_toy_name
from kvferry_wire.fetch import FetchReason

_HUB = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?", re.ASCII)


def fetch(name: str, root: Path, progress: bool = True) -> Path:
    """Get a model and verify it; nothing is downloaded that is there already. As ``get``, and only the path."""
    return get(name, root, FetchOptions(show="auto" if progress else "none")).path


def get(name: str, root: Path, options: FetchOptions) -> Fetched:
    """Get a model and verify it; nothing is downloaded that is there already.

    Args:
        name: a path (one that exists goes first), a demo model's name, a hub id (``owner/model`` or
            ``hf://owner/model@revision``), ``http(s)://HOST/FOLDER/`` or of a .gguf file, or ``s3://BUCKET/PREFIX``.
        root: folder of fetched models; made if it lacks.

    Raises:
        FetchError: with its reason.
    """
    if is_toy_name(name):
        raise FetchError(f"model {name!r}: the toy model has no files; serve it by this name", FetchReason.REFUSED)
    if Path(name).expanduser().exists():
        path = verified(Path(name).expanduser())
        return Fetched(path=path, source=name, bytes=_size(path))
    if name in demo.DEMO_MODELS:
        model = demo.DEMO_MODELS[name]
        path = verified(demo.fetch_demo(model, root, options))
        return Fetched(path=path, source=name, bytes=_size(path))
    if name.startswith(("http://", "https://")):
        from kvferry_runtime.model.fetch.collect import collect
        from kvferry_runtime.model.fetch.web import web_store

        return collect(web_store(name, options), root, slug("web", name), name, options)
    if name.startswith("s3://"):
        from kvferry_runtime.model.fetch.collect import collect
        from kvferry_runtime.model.fetch.s3 import s3_store

        place = slug("s3", f"{options.s3_endpoint or ''} {name}")
        return collect(s3_store(name, options), root, place, name, options)
    if (found := _HUB.fullmatch(name)) and ".." not in name:
        from kvferry_runtime.model.fetch.collect import collect
        from kvferry_runtime.model.fetch.hub import HubStore

        repository, revision = found[1], found[2]
        pointer = LATEST if revision is None else f"{LATEST}@{quote(revision, safe='')}"
        store = HubStore(repository, revision, options)
        return collect(store, root, slug("hf", repository), name, options, pointer=pointer)
    raise FetchError(
        f"model {name!r}: no such path; accepted: a path, {', '.join(demo.DEMO_MODELS)}, a hub id such as owner/model,"
        " http(s)://HOST/FOLDER/ or s3://BUCKET/PREFIX",
        FetchReason.MISSING,
    )


def verified(path: Path) -> Path:
    """The path, if the model there can be opened. Raises ``FetchError``."""
    try:
        open_folder(path)
    except ModelError as error:
        raise FetchError.of_model(error) from error
    return path


def _size(path: Path) -> int:
    """Bytes of a model's files."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)) if file.is_file())
