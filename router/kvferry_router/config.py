"""The router's configuration: parsed once from the command line, every bad value reported together."""

import argparse
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from kvferry_router.discovery.api_server import SERVICE_ACCOUNT
from kvferry_router.discovery.cluster import PoolServices
from kvferry_router.flow_messages import FailurePolicy
from kvferry_router.select.policy import Mode, Policy
from kvferry_wire.limits import DEFAULT_LIMITS

_DEFAULT_POLICY = Policy()
_DRAIN_S = 5.0
_DNS_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_WATCHED = re.compile(f"(?P<namespace>{_DNS_LABEL})/(?P<service>{_DNS_LABEL})")


class ConfigError(ValueError):
    """Flags that cannot be used; the message names each with what was given and what is accepted."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the flags say."""

    service_name: str
    model_name: str
    pods_file: Path | None  # exactly one of this and `services`
    services: PoolServices | None
    service_account_dir: Path
    keys_dir: Path
    host: str
    port: int
    auth: Literal["none", "api-keys"]
    api_keys_file: Path | None
    disaggregate: Mode
    disaggregate_min_tokens: int
    disaggregate_max_cached_share: float
    transfer_failure: FailurePolicy
    request_deadline_s: float
    drain_s: float
    parent_fd: int | None
    ready_file: Path | None
    log_json: bool | None  # None: JSON unless standard error is a terminal

    def family(self) -> int:
        """4 or 6: of the address that it listens on, which is its pod's own in a cluster."""
        return 6 if ":" in self.host else 4

    def policy(self) -> Policy:
        return Policy(
            disaggregate=self.disaggregate,
            disaggregate_min_tokens=self.disaggregate_min_tokens,
            disaggregate_max_cached_share=self.disaggregate_max_cached_share,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``python -m kvferry_router``."""
    parser = _Parser(
        prog="kvferry_router",
        description="The prefix-aware router of one InferenceService.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_pods(parser.add_argument)
    _add_door(parser.add_argument)
    _add_routing(parser.add_argument)
    _add_process(parser.add_argument)
    return parser


def _add_pods(add: Callable[..., object]) -> None:
    """Which service it is, and where its pods are."""
    add("--service-name", required=True, help="name of the InferenceService, for logs")
    add("--model-name", required=True, help="the one model name that clients may ask for")
    add("--pods-file", type=Path, help="JSON file with the pods' addresses, read again when it changes")
    for role in ("prefill", "decode"):
        add(
            f"--watch-{role}",
            metavar="NAMESPACE/SERVICE",
            help=f"in a cluster, in place of --pods-file: the headless Service of the {role} pods",
        )
    add(
        "--service-account-dir",
        type=Path,
        default=SERVICE_ACCOUNT,
        help="with --watch-*: the folder with token and ca.crt of the pod's ServiceAccount",
    )
    add("--keys-dir", required=True, type=Path, help="folder with the key files http, state and hash")


def _add_door(add: Callable[..., object]) -> None:
    """Where clients come in, and who may."""
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", default=8000, type=int, help="port to listen on; 0 takes a free one")
    add(
        "--auth",
        default="api-keys",
        choices=("none", "api-keys"),
        help="none: any client may ask, as tenant 'default'",
    )
    add(
        "--api-keys-file",
        type=Path,
        help="lines tenant:sha256hex, or a JSON object; or a folder of such files (*.keys, *.json) and of files with "
        "keys, named after their tenants; needed with --auth api-keys",
    )


def _add_routing(add: Callable[..., object]) -> None:
    """How requests go through the pods."""
    add(
        "--disaggregate",
        default=_DEFAULT_POLICY.disaggregate,
        choices=("auto", "always", "never"),
        help="when prefill pods are used: by the two thresholds, whenever there is one, or not at all",
    )
    add(
        "--disaggregate-min-tokens",
        type=int,
        default=_DEFAULT_POLICY.disaggregate_min_tokens,
        help="prompts with fewer uncached tokens are prefilled by the decode pod",
    )
    add(
        "--disaggregate-max-cached-share",
        type=float,
        default=_DEFAULT_POLICY.disaggregate_max_cached_share,
        help="so are prompts of which more than this share is cached there (0..1)",
    )
    add(
        "--transfer-failure",
        default="recompute",
        choices=get_args(FailurePolicy),
        help="when KV cannot be ferried: decode computes the prompt, another prefill pod is tried before that, or the "
        "request fails",
    )
    add(
        "--request-deadline",
        type=float,
        default=DEFAULT_LIMITS.request_deadline_s,
        metavar="SECONDS",
        help="from a request's arrival to the end of its answer",
    )


def _add_process(add: Callable[..., object]) -> None:
    """How the process ends, and what it tells."""
    add(
        "--drain",
        type=float,
        default=_DRAIN_S,
        metavar="SECONDS",
        help="from SIGTERM for answers under way to end; then they fail",
    )
    add("--parent-fd", type=int, help="reading end of a pipe; the router ends when the other end closes")
    add("--ready-file", type=Path, help="written (JSON: host, port, pid) once the router listens")
    add("--log-format", choices=("auto", "json", "text"), default="auto", help="auto: text on a terminal, else JSON")


def parse_config(argv: list[str]) -> RouterConfig:
    """Raises ``ConfigError`` with every fault at once."""
    args = make_parser().parse_args(argv)
    faults: list[str] = []

    def check(ok: bool, flag: str, given: object, accepted: str) -> None:
        if not ok:
            faults.append(f"{flag}: {given!r} was given; {accepted} is accepted")

    check(bool(args.service_name), "--service-name", args.service_name, "a name")
    check(bool(args.model_name), "--model-name", args.model_name, "a name")
    check(0 <= args.port <= 65535, "--port", args.port, "0 to 65535")
    check(args.disaggregate_min_tokens >= 0, "--disaggregate-min-tokens", args.disaggregate_min_tokens, "0 or more")
    share = args.disaggregate_max_cached_share
    check(0 <= share <= 1, "--disaggregate-max-cached-share", share, "0 to 1")
    check(0 < args.request_deadline <= 86_400, "--request-deadline", args.request_deadline, "more than 0, up to 86400")
    check(0 <= args.drain <= 86_400, "--drain", args.drain, "0 to 86400")
    check(_is_address(args.host), "--host", args.host, "an IP address or localhost")
    if args.auth == "api-keys":
        check(args.api_keys_file is not None, "--api-keys-file", None, "a file or folder (or say --auth none)")
    else:
        check(args.api_keys_file is None, "--api-keys-file", str(args.api_keys_file), "nothing, with --auth none,")
    services = _services(args, check)
    if faults:
        raise ConfigError("; ".join(faults))
    return RouterConfig(
        service_name=args.service_name,
        model_name=args.model_name,
        pods_file=args.pods_file,
        services=services,
        service_account_dir=args.service_account_dir,
        keys_dir=args.keys_dir,
        host=args.host,
        port=args.port,
        auth=args.auth,
        api_keys_file=args.api_keys_file,
        disaggregate=args.disaggregate,
        disaggregate_min_tokens=args.disaggregate_min_tokens,
        disaggregate_max_cached_share=share,
        transfer_failure=args.transfer_failure,
        request_deadline_s=args.request_deadline,
        drain_s=args.drain,
        parent_fd=args.parent_fd,
        ready_file=args.ready_file,
        log_json={"auto": None, "json": True, "text": False}[args.log_format],
    )


def _services(args: argparse.Namespace, check: Callable[[bool, str, object, str], None]) -> PoolServices | None:
    """The Services to watch, if it is those; says what is wrong with them, or with there being neither or both."""
    given = {"--watch-prefill": args.watch_prefill, "--watch-decode": args.watch_decode}
    if not any(given.values()):
        check(args.pods_file is not None, "--pods-file", None, "a file (or both --watch-prefill and --watch-decode)")
        return None
    check(
        args.pods_file is None, "--pods-file", str(args.pods_file), "nothing, with --watch-prefill and --watch-decode,"
    )
    found = {}
    for flag, value in given.items():
        found[flag] = _WATCHED.fullmatch(value or "")
        check(found[flag] is not None, flag, value, "NAMESPACE/SERVICE")
    prefill, decode = found.values()
    if prefill is None or decode is None:
        return None
    namespace, others = decode["namespace"], prefill["namespace"]
    check(namespace == others, "--watch-prefill", args.watch_prefill, f"a Service of the namespace {namespace}")
    check(decode["service"] != prefill["service"], "--watch-prefill", args.watch_prefill, "another than --watch-decode")
    return PoolServices(namespace, prefill["service"], decode["service"])


def _is_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
