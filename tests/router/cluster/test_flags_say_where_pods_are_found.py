"""The router's command line in a cluster: what is accepted, what is told, and what the operator writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry_router.config import ConfigError, RouterConfig, parse_config
from kvferry_router.discovery.api_server import SERVICE_ACCOUNT
from kvferry_router.discovery.cluster import PoolServices
from kvferry_service.key_files import create_keys
from tests.operator.cluster import container_of, make_objects


def parse(*flags: str) -> RouterConfig:
    common = ("--service-name", "demo", "--model-name", "m", "--keys-dir", "keys", "--auth", "none")
    return parse_config([*common, *flags])


def test_both_services_of_one_namespace_are_taken() -> None:
    """In place of the pods file."""
    config = parse("--watch-prefill=team/demo-prefill", "--watch-decode=team/demo-decode")
    assert config.services == PoolServices("team", "demo-prefill", "demo-decode")
    assert config.pods_file is None
    assert config.service_account_dir == SERVICE_ACCOUNT


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--pods-file: None was given; a file (or both --watch-prefill and --watch-decode) is accepted"),
        (("--watch-decode=a/d",), "--watch-prefill: None was given; NAMESPACE/SERVICE is accepted"),
        (("--watch-decode=a/d", "--watch-prefill=a/p", "--pods-file=f"), "--pods-file: 'f' was given; nothing"),
        (("--watch-decode=d", "--watch-prefill=a/p"), "--watch-decode: 'd' was given; NAMESPACE/SERVICE is accepted"),
        (("--watch-decode=a/d/e", "--watch-prefill=a/p"), "--watch-decode: 'a/d/e' was given"),
        (("--watch-decode=a/d),x", "--watch-prefill=a/p"), "--watch-decode: 'a/d),x' was given"),
        (("--watch-decode=../d", "--watch-prefill=a/p"), "--watch-decode: '../d' was given"),
        (("--watch-decode=a/d", "--watch-prefill=b/p"), "a Service of the namespace a is accepted"),
        (("--watch-decode=a/d", "--watch-prefill=a/d"), "another than --watch-decode is accepted"),
    ],
)
def test_what_cannot_be_watched_is_told_by_flag(flags: tuple[str, ...], told: str) -> None:
    """The flag, what was given and what is accepted; nothing reaches a path or a selector unchecked."""
    with pytest.raises(ConfigError) as caught:
        parse(*flags)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["demo", "7b", "a" * 63])
def test_the_routers_parser_takes_the_command_line_that_the_operator_writes(name: str) -> None:
    """Free of faults once the kubelet has put the address in: Services, keys, port and address of the pod."""
    router = {"apiKeys": {"secretRef": {"name": "clients"}}}
    made = make_objects(metadata__name=name, spec__router=router)
    container = container_of(made, "router")
    assert container["command"] == ["python", "-P", "-m", "kvferry_router"]
    config = parse_config([argument.replace("$(POD_IP)", "fd00::7") for argument in container["args"]])
    services = {object_["metadata"]["name"] for object_ in made if object_["kind"] == "Service"}
    assert config.services is not None
    assert {config.services.prefill, config.services.decode} < services
    assert (config.host, config.port, config.family()) == ("fd00::7", 8000, 6)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(config.api_keys_file), str(config.service_account_dir), str(config.keys_dir)} <= mounts
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.port}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz/router", "port": "http"}


def test_ports_of_the_pools_services_have_the_names_that_are_looked_for() -> None:
    """``http`` and ``state``, on the engines' containers and on the headless Services alike."""
    made = make_objects()
    for service in [one for one in made if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None"]:
        ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
        assert {"http", "state"} <= set(ports)
        assert all(name == target for name, target in ports.items())
        assert not service["spec"].get("publishNotReadyAddresses")


def test_outside_of_a_cluster_the_process_ends_with_what_is_missing(tmp_path: Path) -> None:
    """Status 2: nothing that another try would mend."""
    create_keys(tmp_path / "keys", ("http", "state", "hash"))
    flags = ["--service-name", "demo", "--model-name", "m", "--keys-dir", str(tmp_path / "keys"), "--auth", "none"]
    flags += ["--watch-prefill=a/p", "--watch-decode=a/d", "--port", "0", "--service-account-dir", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry_router", *flags],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "KUBERNETES_SERVICE_HOST" in ended.stderr
    assert f"{tmp_path}/token: no such file" in ended.stderr
