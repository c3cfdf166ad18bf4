"""What the variables select, and what a series is told apart by: one constant each."""

from __future__ import annotations

_WHOSE = 'group=~"$group",job_type=~"$job_type"'

# Boards of several runs, and of one: there a run's name is no pattern.
RUNS = f'{_WHOSE},run=~"$run"'
RUN = f'{_WHOSE},run="$run"'

RANKS = 'node=~"$node",rank=~"$rank",local_rank=~"$local_rank"'
RANKS_OF_RUN = f"{RUN},{RANKS}"
RANKS_OF_RUNS = f"{RUNS},{RANKS}"

# One series a run where the whole of it would be ten thousand: in synchronous training rank 0 does
# as many steps as all others, and it logs what is logged once.
RANK_0 = 'rank="0"'

# The node's own numbers carry a run's labels only while it has that one run alone.
NODES = 'group=~"$group|",job_type=~"$job_type|",run=~"$run|",node=~"$node"'
# What the agents tell of themselves belongs to no run.
AGENTS = 'node=~"$node"'

LOGGED = 'name="$name",split="$split"'

BY_RUN = "group, run, job_type"
BY_NODE = "group, run, job_type, node"
BY_RANK = "group, run, job_type, node, rank, local_rank"
BY_GPU = "node, gpu, hw_id, rank"

# Heard of within two exports or scrapes of 60 s, and what they take, as for the rules
# (deploy/prometheus): a dead rank's last value stays visible for five minutes.
ALIVE_S = 150
# What Prometheus evaluates our rules at (deploy/prometheus): a sum over recorded values times this
# is an integral over time.
RULES_EVERY_S = 30
