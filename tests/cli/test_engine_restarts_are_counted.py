"""Restarts of an engine inside its pod show in `ps`, although the pod's process stays."""

import json
from pathlib import Path

from kvferry_cli.local.engine_restarts import EngineRestarts


def test_a_new_incarnation_of_the_same_process_counts(tmp_path: Path) -> None:
    """The first one of each process does not, nor does a file that is missing or damaged."""
    file = tmp_path / "decode-0.json"
    engine = EngineRestarts(file)
    counts = []
    engine.begin()
    for content in (None, "a", "a", "{", "b", None, "b", "c"):
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(content if content == "{" else json.dumps({"incarnation": content, "pid": 1}))
        engine.look()
        counts.append(engine.count)
    assert counts == [0, 0, 0, 0, 1, 1, 1, 2]
    engine.begin()
    assert not file.exists()
    file.write_text('{"incarnation": "d"}')
    engine.look()
    assert engine.count == 2


def test_a_pod_without_an_engine_has_none() -> None:
    """The router, for one."""
    engine = EngineRestarts(None)
    engine.begin()
    engine.look()
    assert engine.count == 0
