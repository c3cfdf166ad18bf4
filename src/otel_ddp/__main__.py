"""Makes `python -m otel_ddp` the same command as `otel-ddp`."""

import sys

from otel_ddp.cli import main

sys.exit(main())
