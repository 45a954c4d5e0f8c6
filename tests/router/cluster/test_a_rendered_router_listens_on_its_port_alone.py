"""The router process as the operator starts it: where it listens, and what it says without an API server."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvferry_service.key_files import create_keys
from tests.operator.cluster import container_of, make_objects
from tests.support.waiting import wait_for

pytestmark = pytest.mark.processes

ADDRESS = "127.79.0.1"
NOBODY = {"KUBERNETES_SERVICE_HOST": "127.79.0.2", "KUBERNETES_SERVICE_PORT": "443"}  # where no API server is


@pytest.fixture
def router(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Running, with what the kubelet mounts and sets."""
    create_keys(tmp_path / "keys", ("http", "state", "hash"))
    (tmp_path / "account").mkdir()
    for name in ("token", "ca.crt"):
        (tmp_path / "account" / name).write_text("x")
    args = [given.replace("$(POD_IP)", ADDRESS) for given in container_of(make_objects(), "router")["args"]]
    args[args.index("--keys-dir") + 1] = str(tmp_path / "keys")
    args += ["--service-account-dir", str(tmp_path / "account"), "--ready-file", str(tmp_path / "ready")]
    command = [sys.executable, "-P", "-m", "kvferry_router", *args]
    with subprocess.Popen(command, env=os.environ | NOBODY, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: (tmp_path / "ready").exists() or process.poll() is not None, "the router to listen")
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(20) == 0


def test_it_binds_its_pods_address_and_its_one_port(router: "subprocess.Popen[bytes]") -> None:
    """Nothing else of it can be reached."""
    own = psutil.Process(router.pid)
    bound = {tuple(one.laddr) for one in own.net_connections("inet") if one.status == psutil.CONN_LISTEN}
    assert bound == {(ADDRESS, 8000)}
    assert not [one for one in own.net_connections("inet") if one.type.name == "SOCK_DGRAM"]


def test_it_lives_and_is_not_ready_while_no_api_server_is_there(router: "subprocess.Popen[bytes]") -> None:
    """A restart by the kubelet would not help; clients are sent elsewhere."""
    url = f"http://{ADDRESS}:8000"
    with urllib.request.urlopen(url + "/healthz", timeout=5) as response:
        assert response.status == 200
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url + "/readyz", timeout=5)
    with caught.value as answer:
        assert answer.code == 503
        assert "the API server has not told of any pods yet" in json.loads(answer.read())["reason"]
    assert router.poll() is None
