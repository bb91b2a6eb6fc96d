"""`python -m trio_infer` is the command `trio-infer`."""

from __future__ import annotations

import sys

from trio_infer.cli import main

sys.exit(main())
