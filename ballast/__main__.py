"""`python -m ballast fit|sft|preferences|evaluate|...`: see `ballast.commands`."""

import sys

from ballast.commands import main

if __name__ == "__main__":
    sys.exit(main())
