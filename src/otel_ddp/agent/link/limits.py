"""What both ends of a link keep to: the largest messages, and when a peer is dead."""

from __future__ import annotations

MOST_REPORT_BYTES = 4 << 20
MOST_ANSWER_BYTES = 1 << 20
# What an end writes into a message as it sends it.
STAMP_BYTES = 1024
MOST_NODE_LETTERS = 253

# A follower that has nothing to send pings, and the lead answers each ping. A shorter time would
# cut off a node that is busy.
PING_EVERY_S = 2.0
DEAD_AFTER_S = 8.0
