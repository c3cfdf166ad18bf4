"""Label matchers for the variables, and the labels that identify series."""

from __future__ import annotations

# For boards of several runs, and of one, where the name of a run is no pattern.
WHOLE_RUNS = 'group=~"$group",run=~"$run"'
WHOLE_RUN = 'group=~"$group",run="$run"'
# Only series of ranks have a role.
_ROLE = 'job_type=~"$job_type"'
RUNS = f"{WHOLE_RUNS},{_ROLE}"
RUN = f"{WHOLE_RUN},{_ROLE}"
# The run that another one is compared with, whatever its role.
RUN_BEFORE = 'group=~"$group",run="$before"'
# Alerts are about ranks or about runs.
ALERTS_OF_RUNS = f'{WHOLE_RUNS},job_type=~"$job_type|"'
ALERTS_OF_RUN = f'{WHOLE_RUN},job_type=~"$job_type|"'
# Before a run is chosen.
GROUPS = 'group=~"$group"'
RANKS_OF_GROUPS = f"{GROUPS},{_ROLE}"

RANKS = 'node=~"$node",rank=~"$rank",local_rank=~"$local_rank"'
RANKS_OF_RUN = f"{RUN},{RANKS}"
RANKS_OF_RUNS = f"{RUNS},{RANKS}"

# In Loki what tells a run is no label of a stream but metadata of each line. A pattern that matches
# the empty text also finds the lines that lack it, such as verdicts on a whole run.
LINES_OF_RUN = (
    '{service_name=~"$service"} | group=~"$group" | run="$run" | job_type=~"$job_type|" '
    '| node=~"$node|" | rank=~"$rank|" | local_rank=~"$local_rank|" | detected_level=~"$severity"'
)

# One series instead of ten thousand: in synchronous training rank 0 makes as many steps as all
# others, and it logs what is logged once.
RANK_0 = 'rank="0"'

# Series of a node have the labels of a run only while it has no other run.
NODES = 'group=~"$group|",run=~"$run|",node=~"$node"'
# The agents' series on themselves belong to no run.
AGENTS = 'node=~"$node"'

LOGGED = 'name="$name",split="$split"'

BY_RUN = "group, run"
BY_NODE = "group, run, node"
BY_RANK = "group, run, job_type, node, rank, local_rank"

# Two exports or scrapes of 60 s and their latency, as in the rules (deploy/prometheus): without it,
# the last value of a dead rank is visible for five minutes.
ALIVE_S = 150
# The interval of the rules: a sum over recorded values times this is an integral over time.
RULES_EVERY_S = 30
# The interval of the rules of fleet.yml that list runs.
SEEN_EVERY_S = 300
