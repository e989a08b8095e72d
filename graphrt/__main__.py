"""python -m graphrt"""

import sys

from graphrt.tools.cli import main

sys.exit(main())
