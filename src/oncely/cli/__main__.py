"""``python -m oncely.cli``."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the working directory: it must not shadow modules of Python

from oncely.cli.verbs import main

main()
