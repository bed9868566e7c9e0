"""The process that is killed: ``python -m oncely.testing.torture.child ORDER``.

It works for one database after the other; the last work may end with a kill. So one start of Python
serves for the restart of one trial and the run of the next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from oncely.pipeline.handling import worker_of
from oncely.stores.sql.connection import close_all
from oncely.testing.faults import LEND, KillAt


def main(file: Path) -> int:
    """Execute an order: ``{"app": …, "brokers": …, "works": [{"url", "group", "call", "after"}]}``.

    After each work the calls to its database, from the first call of a handler on, are beside the
    file.
    """
    order: dict[str, Any] = json.loads(file.read_text())
    sys.path.append("")
    app = worker_of(order["app"])
    for number, work in enumerate(order["works"]):
        app.relocate(order["brokers"], work["url"], work["group"])
        killing = KillAt(work["call"], work["after"], armed_by=LEND)
        app.pipeline.replaced(connect=killing).work("latest")
        close_all()
        file.with_suffix(f".{number}").write_text(json.dumps(killing.counter.seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
