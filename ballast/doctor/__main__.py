"""`python -m ballast doctor`: see `ballast.doctor`."""

import sys

from ballast.doctor import main

sys.exit(main())
