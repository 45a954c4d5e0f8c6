"""Makes the libraries that images carry: ``python -m kvferry_kernels.native.prebuild [FOLDER]``.

One for each level of x86-64 in ``levels.LEVELS``, for packages that are to run where there is no compiler. On other
machines it makes none: there the library is built where it runs.
"""

import platform
import sys
import tempfile
from pathlib import Path

from kvferry_kernels.native.compiler import BUILD_S, Compiler
from kvferry_kernels.native.levels import LEVELS, PREBUILT, prebuilt_name


def prebuild(folder: Path) -> list[Path]:
    """Compile each level into the folder. Raises ``BuildError``."""
    folder.mkdir(parents=True, exist_ok=True)
    if platform.machine() != "x86_64":
        return []
    compiler = Compiler.find()
    made = []
    for level in LEVELS:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = Path(scratch) / "kernels.so"
            compiler.compile((f"-march={level}",), library, BUILD_S)
            library.chmod(0o644)
            made.append(library.replace(folder / prebuilt_name(level)))
    return made


if __name__ == "__main__":
    for path in prebuild(Path(sys.argv[1]) if len(sys.argv) > 1 else PREBUILT):
        sys.stdout.write(f"{path}\n")
