"""The command line of ``python -m kvferry_operator``."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry_operator.plan.manifests.settings import ClusterSettings, decode_settings

LEVELS = ("debug", "info", "warning", "error")
MAX_NAMESPACES = 256
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class OptionsError(ValueError):
    """Options that cannot be used; the text names each with what was given and what is accepted."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the chart's Deployment says."""

    settings: ClusterSettings
    lease_name: str
    lease_namespace: str
    identity: str
    port: int
    host: str
    namespaces: tuple[str, ...] | None  # None: all
    log_level: str
    log_json: bool


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line and the settings file.

    Raises:
        OptionsError: all that is wrong, together.
        SystemExit: --help, or an option that does not exist.
    """
    given = _parser().parse_args(argv)
    faults: list[str] = []
    namespaces = None if given.all_namespaces else tuple(part for part in given.namespaces.split(",") if part)
    if not given.all_namespaces and not namespaces:
        faults.append("--namespaces: none given; name at least one, or say --all-namespaces")
    if namespaces is not None and len(namespaces) > MAX_NAMESPACES:
        faults.append(f"--namespaces: {len(namespaces)} given; at most {MAX_NAMESPACES}, or say --all-namespaces")
    names = [("--namespaces", name) for name in namespaces or ()]
    for flag, name in (*names, ("--lease-namespace", given.lease_namespace), ("--lease-name", given.lease_name)):
        if not _NAME.fullmatch(name):
            faults.append(f"{flag}: got {name!r}; a name has 1 to 63 of a-z, 0-9 and -")
    if not given.identity:
        faults.append("--identity: empty; the pod's name")
    if not 0 <= given.port <= 65535:
        faults.append(f"--port: got {given.port}; 1 to 65535, or 0 for a free one")
    settings = _settings(Path(given.settings_file), faults)
    if faults or settings is None:
        raise OptionsError("\n".join(faults))
    return Options(
        settings=settings,
        lease_name=given.lease_name,
        lease_namespace=given.lease_namespace,
        identity=given.identity,
        port=given.port,
        host=given.host,
        namespaces=namespaces if namespaces is None else tuple(dict.fromkeys(namespaces)),
        log_level=given.log_level,
        log_json=given.log_format == "json",
    )


def _settings(path: Path, faults: list[str]) -> ClusterSettings | None:
    try:
        return decode_settings(path.read_bytes())
    except OSError as error:
        faults.append(f"--settings-file: {path}: {error.strerror}")
    except msgspec.MsgspecError as error:
        faults.append(f"--settings-file: {path}: {error}")
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry_operator", description="Turns InferenceServices into pods of a Kubernetes cluster."
    )
    add = parser.add_argument
    add("--settings-file", required=True, help="JSON: the chart's settings for the objects that are made")
    add("--lease-name", default="kvferry-operator", help="Lease by which one operator works and the others wait")
    add("--lease-namespace", required=True, help="namespace of the Lease")
    add("--identity", required=True, help="name of this pod, as the Lease tells it")
    add("--port", type=int, default=9090, help="port of /metrics, /healthz and /readyz")
    add(
        "--host",
        default="127.0.0.1",
        help="address of that port; in a pod the pod's own, for probes come from the node",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--namespaces", default="", help="namespaces whose services are served, separated by commas")
    where.add_argument("--all-namespaces", action="store_true", help="serve all namespaces")
    add("--log-level", choices=LEVELS, default="info", help="least level of log lines")
    add("--log-format", choices=("json", "text"), default="text", help="form of log lines")
    return parser
