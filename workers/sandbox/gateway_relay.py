"""A file that leads from a sandbox without network to the gateway of agents, and nowhere else."""

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Thread

from workers.sandbox.supervisor import copy


class GatewayRelay:
    """Listen on a socket in a folder, and connect whoever comes with the gateway."""

    def __init__(self, host: str, port: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="ballast-gateway-")
        os.chmod(self.folder, 0o755)
        self._target = (host, port)
        self._listener = socket.socket(socket.AF_UNIX)
        path = Path(self.folder, "socket")
        self._listener.bind(str(path))
        # Bubblewrap's user may be another one. Requests carry the session's key.
        path.chmod(0o666)
        self._listener.listen()
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            try:
                outer = socket.create_connection(self._target)
            except OSError:
                inner.close()
                continue
            for source, target in ((inner, outer), (outer, inner)):
                Thread(target=copy, args=(source, target), daemon=True).start()
