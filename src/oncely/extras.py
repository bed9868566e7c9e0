"""Optional packages: extras, plug-ins and ``oncely-native``.

``pip install 'oncely[EXTRA]'`` adds those of an extra. A plug-in is found by its entry point.
``oncely-native`` does some of the work of this package faster.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from oncely.errors import ConfigError, WrongInput

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "spark": ("pyspark", "pandas"),
    "sql": ("psycopg", "pgpq"),
    "files": ("polars",),
    "delta": ("deltalake", "obstore", "polars"),
    "registry": ("authlib", "cachetools"),
    "redis": ("redis",),
    "zookeeper": ("kazoo",),
    "web": ("starlette", "uvicorn"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""The names by which the packages of an extra are imported."""


MODULES = "ONCELY_MODULES"
"""The environment variable with the driver's path of modules, which Spark's local workers have at
the end of theirs: ``PYTHONPATH`` would be before Python's modules."""


def is_installed(package: str) -> bool:
    """True if the package can be imported; of a module in a package, the package is."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


WITHOUT_SPARK = ', or write runtime = "processes", which runs all but a Spark transform'
"""The other way out of a run on Spark that is not installed."""


def require(extra: str, key: str, subject: str, otherwise: str = "") -> None:
    """Refuse to continue without the packages of an extra.

    Args:
        extra: a key of :data:`PACKAGES`.
        key: the key of the pipeline file, or the command, that needs them.
        subject: the subject of the sentence.
        otherwise: a second way out.

    Raises:
        ConfigError: a package is not installed.
    """
    for package in PACKAGES[extra]:
        if not is_installed(package):
            raise ConfigError(
                key,
                f"{subject} needs the package {package}, which is not installed",
                way_out=f"pip install 'oncely[{extra}]'{otherwise}",
            )


KINDS = "oncely.kinds"
"""The group of the entry points that are kinds of destinations."""


@cache
def plugin(group: str, name: str) -> Any:
    """The object of an entry point; that of Oncely itself, if another package has the name too.

    Args:
        group: of entry points.
        name: of one that is installed.
    """
    from importlib.metadata import distribution, entry_points

    own = distribution("oncely").entry_points.select(group=group, name=name)
    (found,) = own or entry_points(group=group, name=name)
    return found.load()


@cache
def plugins(group: str) -> tuple[Any, ...]:
    """The objects of all entry points of a group, by their ``rank`` and ``name``.

    Raises:
        WrongInput: there is none: the package was copied here, not installed.
    """
    from importlib.metadata import entry_points

    names = entry_points(group=group).names
    if not names:
        raise WrongInput(
            f"no installed package has an entry point of {group}, not even Oncely itself: its"
            " metadata (oncely-*.dist-info) is missing, or of an older version",
            way_out="install Oncely by pip; a folder, or an archive, needs the metadata beside it",
        )
    return tuple(sorted((plugin(group, name) for name in names), key=lambda k: (k.rank, k.name)))


class Deferred:
    """A package of an extra; imported when an attribute of it is used.

    Args:
        package: its name.
        extra, key, subject: as of :func:`require`.
    """

    def __init__(self, package: str, extra: str, key: str, subject: str) -> None:
        self._package, self._required = package, (extra, key, subject)

    def __getattr__(self, name: str) -> Any:
        require(*self._required)
        value = getattr(importlib.import_module(self._package), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import polars
else:
    polars = Deferred("polars", "files", "sink.kind", "reading or writing files")

__all__ = ["PACKAGES", "Deferred", "absence", "is_installed", "native", "polars", "require"]


# -- oncely-native --------------------------------------------------------------------------

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
