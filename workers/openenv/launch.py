"""Serve an environment on a socket: `python launch.py DESCRIPTOR`.

The package's own Python runs this file, so it imports nothing of ours. `main` of a package is not called:
many serve on port 8000, whatever they are asked.
"""

import socket
import sys
from importlib import import_module
from importlib.metadata import entry_points


def main() -> None:
    scripts = list(entry_points(group="console_scripts", name="server"))
    if not scripts:
        sys.exit("the package has no script `server`, as environments of OpenEnv have")
    module = import_module(scripts[0].module)
    if not hasattr(module, "app"):
        sys.exit(f"{module.__name__} has no `app`, as servers of OpenEnv have")
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(module.app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()
