"""The library of C++ operators, built once for this user. Where there is none, tests are skipped with the reason."""

import os
import shutil

import pytest
import torch

from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.native.provide import open_library


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    provided = open_library()
    if provided.library is None:
        if os.environ.get("CI") and shutil.which("c++"):
            pytest.fail(f"there is a compiler, and no library: {provided.reason}")
        pytest.skip(provided.reason)
    return provided.library


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
