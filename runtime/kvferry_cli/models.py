"""Brings a model to this machine: the one place where the command line fetches."""

from pathlib import Path

from kvferry_cli.errors import ExitCode, UserError
from kvferry_operator.api.source import ModelSource, parse_source

# The demo model answers to its served name as well.
DEMO_NAMES = {"smollm2-135m-instruct": "demo:smollm2"}
ACCEPTS = "accepts demo:smollm2, a hub id (org/name), a folder or GGUF file, or toy"


def resolve_model(source: ModelSource, base: Path, *, progress: bool) -> str:
    """The model as the engine takes it: an absolute path, or the toy's name.

    Args:
        source: where it comes from.
        base: the folder that a relative path starts from.
        progress: show a bar while downloading.

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
    if source.kind in ("pvc", "image"):
        raise UserError(f"model {source}: needs a cluster; {ACCEPTS}", ExitCode.USAGE)
    if source.revision is not None:
        raise UserError(f"model {source}: revisions cannot be fetched yet; leave out @{source.revision}")
    from kvferry_runtime.model.fetch import FetchError, default_root, fetch

    try:
        return str(fetch(str(source) if source.kind == "demo" else source.name, default_root(), progress=progress))
    except FetchError as error:
        raise UserError(str(error)) from None


def fetch_model(source: ModelSource, base: Path, *, progress: bool) -> str:
    """Like ``resolve_model``, and what lies here already is checked too. Raises ``UserError``."""
    from kvferry_runtime.model.fetch import FetchError, default_root, fetch

    path = resolve_model(source, base, progress=progress)
    if source.kind not in ("path", "toy"):
        return path  # checked when it was fetched
    try:
        return str(fetch(path, default_root(), progress=progress))
    except FetchError as error:
        raise UserError(str(error)) from None


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
