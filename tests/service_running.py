"""A `kvtool serve` in a process of its own, for tests of clients."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests import store_servers

HAVE_SERVICE = all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "prometheus_client", "urllib3"))


@dataclass
class Running:
    """A service.

    Attributes:
        address: where it listens.
        process: its process.
        said: lines that it wrote to stderr so far.
    """

    address: str
    process: subprocess.Popen
    said: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])


@contextlib.contextmanager
def service(store: Path | str, *options: str, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """Context manager: a service on a free port of this machine, gone afterwards."""
    command = [sys.executable, "-m", "kvtool", "serve", "--store", str(store), "--port", "0", *options]
    whole = {**os.environ, **(environment or {})}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=whole, cwd=Path(__file__).parents[1])
    with store_servers.ended(process):
        assert process.stderr is not None
        said: list[str] = []
        address = ""
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"listening at (\S+)", line):
                address = found[1]
                break
        assert address, "".join(said)
        running = Running(address, process, said)
        reading = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
        reading.start()
        try:
            yield running
        finally:
            process.kill()
            reading.join(10)
            process.stderr.close()
