"""The optional package ``oncely-native``, which does some of the work of this package faster."""

from __future__ import annotations

import importlib
import os
from typing import Any

SWITCH = "ONCELY_NATIVE"
"""The environment variable that turns the package off: ``off``."""

NEEDED = "0.2.0"
"""The version of the package that this version of Oncely can call."""


def native() -> Any | None:
    """The module ``oncely_native``; None if it can't be used, see :func:`absence`."""
    module = None if _turned_off() else _installed()
    return module if getattr(module, "__version__", None) == NEEDED else None


def absence() -> str | None:
    """Why the package is not used, and what to do; None if it is used or was turned off."""
    if _turned_off() or native() is not None:
        return None
    what, module = "is not installed", _installed()
    if module is not None:
        what = f"{getattr(module, '__version__', 'of another version')} is not used"
    return (
        f"oncely-native {what}: records are read and decoded in Python, more slowly;"
        f" for the speed of native code install oncely-native {NEEDED} (make native;"
        " from its wheel: pip install --find-links FOLDER 'oncely[native]')"
    )


def _turned_off() -> bool:
    return os.environ.get(SWITCH) == "off"


def _installed() -> Any | None:
    try:
        return importlib.import_module("oncely_native")
    except ImportError:
        return None
