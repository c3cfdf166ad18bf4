"""python -m otel_ddp is otel-ddp."""

import sys

from otel_ddp.cli import main

sys.exit(main())
