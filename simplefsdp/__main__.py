"""``python -m simplefsdp`` is the command ``simplefsdp``."""

import sys

from simplefsdp.cli import main

sys.exit(main())
