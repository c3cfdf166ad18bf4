"""The agents of a run on several nodes: one leads, the others follow it over gRPC with mutual TLS.

What is here imports grpc and cryptography, 24 MiB and 100 ms: only an agent that has a run on
several nodes imports it.
"""

import os

# Read when grpc is imported: its core prints a line of its own for each handshake that fails, and
# strangers could fill the agent's log with them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
