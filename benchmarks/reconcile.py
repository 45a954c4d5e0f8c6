"""The operator on a real API server: how fast, how quiet, how large, how soon after a fault.

    python benchmarks/reconcile.py [--services 500] [--rest 60] [--rounds 3] [--json FILE]

The measuring is in ``_operator_figures.py``. Scripts of this folder find this file where they ask for the standard
library's ``operator``: asked for under that name, it gives way.
"""

import sys

if __name__ == "operator":
    HERE = __file__.rpartition("/")[0]
    PATH = list(sys.path)
    sys.path[:] = [entry for entry in PATH if entry != HERE]
    del sys.modules["operator"]
    import operator  # noqa: F401 - the other one, which takes this one's place

    sys.path[:] = PATH
elif __name__ == "__main__":
    from _operator_figures import main

    raise SystemExit(main())
