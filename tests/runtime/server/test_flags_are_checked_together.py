"""The pod's flags: every fault at once, with the flag, what was given and what is accepted."""

import pytest

from kvferry_runtime.server.config import FLAGS, parse, usage
from kvferry_runtime.server.flags import FlagError


def faults_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(FlagError) as caught:
        parse(list(argv))
    return caught.value.faults


def test_defaults_and_values() -> None:
    """A model alone is enough; each value is read in its own type."""
    config = parse(["toy:vocab=300"], env={"OMP_NUM_THREADS": "3"})
    assert (config.served_name, config.host, config.port, config.role) == ("toy", "127.0.0.1", 8000, "both")
    assert (config.threads, config.threads_why) == (3, "OMP_NUM_THREADS")
    config = parse(
        ["--model=/m/smol/", "--kv-memory", "512MiB", "--lease=0.5", "--no-prefix-caching", "--threads", "2"], env={}
    )
    assert (config.served_name, config.kv_memory, config.limits.lease_s) == ("smol", 512 * 2**20, 0.5)
    assert not config.prefix_caching
    assert config.checksums
    assert not parse(["toy", "--no-checksums"], env={}).checksums
    assert config.threads_why == "--threads"
    assert parse(["toy"], env={"OMP_NUM_THREADS": "many"}).threads >= 1


def test_all_faults_are_reported_together() -> None:
    """Unknown, malformed, out of range, missing and contradicting flags in one message."""
    faults = faults_of("--port", "70000", "--role", "chef", "--frobnicate", "9", "--lease", "nan", "--kv-memory=5XB")
    text = "\n".join(faults)
    assert "--port: '70000' given; a whole number from 0 to 65535 is accepted" in text
    assert "--role: 'chef' given; one of prefill, decode, both is accepted" in text
    assert "--frobnicate: not a flag" in text
    assert "--lease: 'nan'" in text
    assert "--kv-memory: '5XB'" in text
    assert "--model: not given" in text
    assert len(faults) == 6


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("toy", "--host", "0.0.0.0"), "--host"),
        (("toy", "--host", "::"), "--host"),
        (("toy", "--role", "decode"), "--role"),
        (("toy", "--kv-blocks", "5", "--kv-memory", "1GiB"), "--kv-blocks and --kv-memory"),
        (("toy", "--token-budget", "5", "--max-running", "9"), "--token-budget"),
        (("toy", "--port"), "--port: no value"),
        (("toy", "--port", "--host", "x"), "--port: no value"),
        (("toy", "--port", "1", "--port", "2"), "--port: given more than once"),
        (("toy", "--no-prefix-caching=yes"), "--no-prefix-caching: takes no value"),
        (("--model", ""), "--model: ''"),
    ],
)
def test_what_cannot_be_is_named(argv: tuple[str, ...], named: str) -> None:
    """Without keys a pod serves loopback and both roles only; contradictions are refused."""
    assert any(fault.startswith(named) for fault in faults_of(*argv))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """Every name of this machine itself is accepted."""
    assert parse(["toy", "--host", host]).host == ("127.0.0.1" if host == "localhost" else host)


def test_help_names_every_flag_with_its_default() -> None:
    """Nothing is hidden."""
    text = usage()
    assert all(flag.name in text and flag.help in text for flag in FLAGS)
    assert "[default: 8000]" in text
