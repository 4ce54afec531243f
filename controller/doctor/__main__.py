"""`python -m controller.doctor`: see `controller.doctor`."""

import sys

from controller.doctor import main

sys.exit(main())
