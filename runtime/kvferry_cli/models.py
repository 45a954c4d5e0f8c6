"""Brings a model to this machine: the one place where the command line fetches."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry_cli.errors import ExitCode, UserError
from kvferry_operator.api.source import ModelSource, parse_source
from kvferry_wire.fetch import COMMIT_VARIABLE, FETCH_EXITS

if TYPE_CHECKING:
    from kvferry_runtime.model.fetch import Fetched, FetchOptions

# The demo model answers to its served name as well.
DEMO_NAMES = {"smollm2-135m-instruct": "demo:smollm2"}
ACCEPTS = (
    "accepts demo:smollm2, a hub id (org/name or hf://org/name@revision), http(s)://HOST/FOLDER/, s3://BUCKET/PREFIX,"
    " a folder or GGUF file, or toy"
)
TOKEN_VARIABLE = "KVFERRY_TOKEN_FILE"  # noqa: S105 - names a file with the token for http(s) sources
S3_VARIABLE = "KVFERRY_S3_CREDENTIALS"  # names a folder with credentials for s3 sources, one file each


def resolve_model(
    source: ModelSource,
    base: Path,
    *,
    progress: bool,
    s3_endpoint: str | None = None,
    s3_region: str | None = None,
) -> str:
    """The model as the engine takes it: an absolute path, or the toy's name.

    Args:
        source: where it comes from.
        base: the folder that a relative path starts from.
        progress: show how far a download is.
        s3_endpoint: of the manifest, as the region; None: as AWS's tools find them.

    Raises:
        UserError: it is not there, or could not be fetched.
    """
    if source.kind == "toy":
        return str(source)
    if source.kind == "path":
        path = (base / Path(source.name).expanduser()).absolute()
        if not path.exists():
            raise UserError(f"model {source.name}: there is no {path}")
        return str(path)
    options = _options(progress, s3_endpoint=s3_endpoint, s3_region=s3_region)
    return str(_got(source, str(source), options, code=ExitCode.FAILED).path)


def fetch_model(source: ModelSource, base: Path, *, progress: bool, max_bytes: int | None = None) -> "Fetched":
    """Like ``resolve_model``, and what lies here already is checked too.

    Raises:
        UserError: with a status of its own for each reason (``kvferry_wire.fetch``).
    """
    name = str(source)
    if source.kind == "path":
        name = str((base / Path(source.name).expanduser()).absolute())
        if not Path(name).exists():
            raise UserError(f"model {source.name}: there is no {name}")
    return _got(source, name, _options(progress, max_bytes=max_bytes))


def _got(source: ModelSource, name: str, options: "FetchOptions", *, code: int | None = None) -> "Fetched":
    """Fetch; ``code`` is the status of a failure, in place of the reason's own."""
    if source.kind in ("pvc", "image"):
        raise UserError(f"model {source}: needs a cluster; {ACCEPTS}", ExitCode.USAGE)
    from kvferry_runtime.model.fetch import FetchError, default_root, get

    try:
        return get(name, default_root(), options)
    except FetchError as error:
        raise UserError(str(error), FETCH_EXITS[error.reason] if code is None else code) from None


def _options(
    progress: bool, *, max_bytes: int | None = None, s3_endpoint: str | None = None, s3_region: str | None = None
) -> "FetchOptions":
    """What is asked for, and what the environment says."""
    from kvferry_runtime.model.fetch import FetchOptions

    return FetchOptions(
        show="auto" if progress else "none",
        max_bytes=max_bytes,
        commit=os.environ.get(COMMIT_VARIABLE) or None,
        token_file=_path_of(TOKEN_VARIABLE),
        s3_endpoint=s3_endpoint,
        s3_region=s3_region,
        s3_credentials=_path_of(S3_VARIABLE),
    )


def _path_of(variable: str) -> Path | None:
    given = os.environ.get(variable)
    return Path(given) if given else None


def parse_model_argument(text: str) -> ModelSource:
    """A model named on the command line: any path that exists, else as in a manifest. Raises ``UserError``."""
    if Path(text).expanduser().exists():
        return ModelSource(kind="path", name=text)
    if text in DEMO_NAMES:
        return parse_source(DEMO_NAMES[text])
    try:
        return parse_source(text)
    except ValueError:
        raise UserError(f"model {text!r}: not a model source; {ACCEPTS}", ExitCode.USAGE) from None
