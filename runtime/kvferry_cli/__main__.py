"""``python -m kvferry_cli``: the same as ``kvferry``."""

import sys

from kvferry_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
