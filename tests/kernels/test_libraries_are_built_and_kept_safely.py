"""The library is built once, kept where only its user can write, and its absence has a reason instead of a crash."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry_kernels.native import cache, compiler, levels, provide
from kvferry_kernels.native.compiler import BuildError, Compiler
from kvferry_kernels.native.library import NativeLibrary

KERNELS = Path(provide.__file__).parents[2]
OPEN = (
    "from kvferry_kernels.native.provide import open_library\n"
    "opened = open_library()\n"
    "print(opened.library is not None, opened.reason)\n"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no library that came with the package."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(provide, "PREBUILT", tmp_path / "none")
    return tmp_path


@pytest.fixture
def real(home: Path) -> Compiler:
    try:
        return Compiler.find()
    except BuildError as error:
        pytest.skip(str(error))


def fake_compiler(folder: Path, body: str) -> str:
    """A program that says a version and then does what the body says."""
    path = folder / "fake-c++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return str(path)


def library_of(folder: Path, body: str) -> str:
    """A compiler that makes a library of this C++ in place of ours."""
    source = folder / "other.cpp"
    source.write_text(body)
    return fake_compiler(
        folder,
        f'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\nexec c++ -shared -fPIC {source} -o "$out"',
    )


@pytest.mark.slow
def test_a_build_is_kept_and_found_again(real: Compiler, home: Path) -> None:
    """Folder 0700, file 0600, nothing else left; a second look loads it without a compiler run."""
    first = provide.open_library()
    assert first.library is not None and first.reason.startswith("built in ")
    folder = home / "cache" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == sorted(["lock", f"{real.key(compiler.native_flags())}.so"])
    assert stat.S_IMODE((folder / kept[0]).stat().st_mode) & 0o077 == 0
    again = provide.open_library()
    assert again.library is not None and again.reason.startswith("built before for this CPU")


@pytest.mark.slow
def test_two_processes_build_once(real: Compiler, home: Path) -> None:
    """The second waits for the first and takes what it made."""
    env = {**os.environ, "KVFERRY_CACHE": str(home / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", OPEN], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = sorted(process.communicate(timeout=100)[0].strip() for process in both)
    assert [line.split(" built ")[0] for line in said] == ["True", "True"]
    assert sum("built in" in line for line in said) <= 1
    assert len(list((home / "cache" / "kernels").glob("*.so"))) == 1


def test_no_compiler_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image without one."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(home))
    assert provide.open_library() == provide.Provided(None, "no C++ compiler (c++, g++, clang++) was found")
    monkeypatch.setenv("CXX", "ours-c++ -m64")
    assert provide.open_library().reason == "no C++ compiler (ours-c++ -m64) was found"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "echo 'kernels.cpp:1: error: no such thing' >&2; exit 1",
            "failed with status 1: kernels.cpp:1: error: no such",
        ),
        ("exit 3", "failed with status 3"),
        ("kill -SEGV $$", "was ended by signal 11"),
        ("exec sleep 60", "took longer than 1 s"),
        ("sleep 60 & wait", "took longer than 1 s"),
        ("exit 0", "failed with status"),  # no file: the check cannot load it
    ],
)
def test_a_compiler_that_fails_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    """It is quoted, or killed with its children at the end of its time; nothing is kept."""
    monkeypatch.setenv("CXX", fake_compiler(home, body))
    monkeypatch.setattr(provide, "BUILD_S", 1.0)
    opened = provide.open_library()
    assert opened.library is None and said in opened.reason
    assert [path.name for path in (home / "cache" / "kernels").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('extern "C" int kvf_self_test() { return 2; }', "status 2"),
        ('extern "C" int kvf_self_test() { __builtin_trap(); }', "signal"),
    ],
)
def test_what_does_not_compute_is_not_loaded(
    real: Compiler, home: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    """A build that crashes or gives a wrong product does so in a process of its own, and is not kept."""
    monkeypatch.setenv("CXX", library_of(home, source))
    opened = provide.open_library()
    assert opened.library is None and said in opened.reason
    assert not list((home / "cache" / "kernels").glob("*.so"))


def test_another_versions_library_is_refused(real: Compiler, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that lacks is a reason, not an error at the first step."""
    monkeypatch.setenv("CXX", library_of(home, 'extern "C" int kvf_self_test() { return 0; }'))
    opened = provide.open_library()
    assert opened.library is None and "kvf_interface" in opened.reason


@pytest.mark.parametrize("harm", ["folder mode", "folder link", "file mode", "file link", "parent mode"])
def test_what_others_could_have_written_is_not_loaded(home: Path, harm: str) -> None:
    """Whoever can write a library runs code in the engine: such a cache is not used."""
    folder = home / "cache" / "kernels"
    cache.open_folder(folder)
    file = folder / "key.so"
    file.write_bytes(b"")
    file.chmod(0o600)
    assert cache.find(folder, "key") == file
    if harm == "folder mode":
        folder.chmod(0o770)
    elif harm == "folder link":
        folder.rename(home / "elsewhere")
        folder.symlink_to(home / "elsewhere")
    elif harm == "parent mode":
        folder.parent.chmod(0o777)
    elif harm == "file mode":
        file.chmod(0o666)
    else:
        file.rename(folder / "other")
        file.symlink_to(folder / "other")
    with pytest.raises(BuildError):
        cache.open_folder(folder)
        cache.find(folder, "key")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root alone")
@pytest.mark.parametrize("what", ["folder", "file", "parent"])
def test_what_belongs_to_another_is_not_loaded(home: Path, what: str) -> None:
    """Also when its mode looks private."""
    folder = home / "cache" / "kernels"
    cache.open_folder(folder)
    (folder / "key.so").write_bytes(b"")
    os.chown({"folder": folder, "file": folder / "key.so", "parent": folder.parent}[what], 12345, 12345)
    with pytest.raises(BuildError):
        cache.open_folder(folder)
        cache.find(folder, "key")


@pytest.mark.slow
def test_a_cache_that_cannot_be_used_costs_a_build(real: Compiler, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only home, or one that others write: built in a private folder, loaded, and not kept."""
    (home / "cache").write_text("a file in the way")
    monkeypatch.setenv("TMPDIR", str(home))
    opened = provide.open_library()
    assert opened.library is not None and "and not kept" in opened.reason
    assert not list(home.glob("kvferry-kernels-*"))


def test_nowhere_to_write_is_a_reason(real: Compiler, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only root without a place for temporary files."""
    (home / "cache").write_text("a file in the way")

    def none(**_: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(provide.tempfile, "TemporaryDirectory", none)
    opened = provide.open_library()
    assert opened.library is None and "No usable temporary directory" in opened.reason


def test_a_lock_that_is_held_has_a_deadline(home: Path) -> None:
    """A process that hangs while it builds holds up no other for ever."""
    folder = home / "cache" / "kernels"
    cache.open_folder(folder)
    with cache.locked(folder, 1.0), pytest.raises(BuildError, match="another process has been building"):  # noqa: SIM117
        with cache.locked(folder, 0.2):
            pass
    with cache.locked(folder, 0.2):
        pass


def test_old_libraries_go(home: Path) -> None:
    """A cache has a cap: the newest few are kept."""
    folder = home / "cache" / "kernels"
    cache.open_folder(folder)
    for number in range(12):
        built = home / "built.so"
        built.write_bytes(b"")
        os.utime(cache.install(folder, built, f"key{number}"), (number, number))
    kept = {path.name for path in folder.glob("*.so")}
    assert len(kept) == 8 and "key11.so" in kept and "key0.so" not in kept


def test_the_key_is_of_all_that_matters(real: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, flags, compiler, its version and the CPU: a change of any is another library."""
    keys = [real.key(()), real.key(("-march=native",)), Compiler(real.command, "another version").key(())]
    keys.append(Compiler((*real.command, "-m64"), real.version).key(()))
    monkeypatch.setattr(compiler, "cpu_identity", lambda: "another CPU")
    keys.append(real.key(()))
    monkeypatch.setattr(compiler, "sources_digest", lambda: "other sources")
    keys.append(real.key(()))
    assert len(set(keys)) == len(keys)


def test_the_best_prebuilt_level_that_the_cpu_has_is_taken(tmp_path: Path) -> None:
    """A CPU without AVX-512 takes v3, an old one none; a library of other sources is not taken."""
    v3, v4 = levels.LEVELS["x86-64-v3"], levels.LEVELS["x86-64-v4"]
    (tmp_path / "x86-64-v4_0123.so").write_bytes(b"")
    assert levels.prebuilt_path(tmp_path, v4) is None
    paths = {level: tmp_path / levels.prebuilt_name(level) for level in levels.LEVELS}
    paths["x86-64-v3"].write_bytes(b"")
    assert levels.prebuilt_path(tmp_path, v4) == paths["x86-64-v3"]
    paths["x86-64-v4"].write_bytes(b"")
    assert levels.prebuilt_path(tmp_path, v4 | {"more"}) == paths["x86-64-v4"]
    assert levels.prebuilt_path(tmp_path, v3) == paths["x86-64-v3"]
    assert levels.prebuilt_path(tmp_path, v3 - {"fma"}) is None
    assert levels.prebuilt_path(tmp_path, frozenset()) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_images_carry_libraries_that_need_no_compiler(
    real: Compiler, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each level is made, without torch, checks itself where this CPU has it, and is loaded with no compiler there."""
    code = f"import runpy, sys; sys.path.insert(0, {str(KERNELS)!r}); sys.argv[1:] = [{str(home / 'prebuilt')!r}]; "
    code += "runpy.run_module('kvferry_kernels.native.prebuild', run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    made = [Path(line) for line in done.stdout.splitlines()]
    if not made:
        pytest.skip("levels are x86-64's")
    assert [path.name.split("_")[0] for path in made] == list(levels.LEVELS)
    flags = levels.cpu_flags()
    for path, needed in zip(made, levels.LEVELS.values(), strict=True):
        if needed <= flags:
            compiler.check(path)
            assert NativeLibrary(path).lanes == (16 if "v4" in path.name else 8)
    monkeypatch.setattr(provide, "PREBUILT", home / "prebuilt")
    monkeypatch.setenv("PATH", str(home))
    if levels.LEVELS["x86-64-v3"] <= flags:
        assert provide.open_library().reason.startswith("built with this package for x86-64-v")
