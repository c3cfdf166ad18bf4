"""The label matchers of the variables, and the labels that tell series apart, as constants."""

from __future__ import annotations

# Boards of several runs, and of one: there a run's name is no pattern.
WHOLE_RUNS = 'group=~"$group",run=~"$run"'
WHOLE_RUN = 'group=~"$group",run="$run"'
# A role belongs to ranks: series of a whole run, or of a node, have none.
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

# One series a run where the whole of it would be ten thousand: in synchronous training rank 0 does
# as many steps as all others, and it logs what is logged once.
RANK_0 = 'rank="0"'

# The node's own numbers carry a run's labels only while it has that one run alone.
NODES = 'group=~"$group|",run=~"$run|",node=~"$node"'
# The agents' series on themselves belong to no run.
AGENTS = 'node=~"$node"'

LOGGED = 'name="$name",split="$split"'

BY_RUN = "group, run"
BY_NODE = "group, run, node"
BY_RANK = "group, run, job_type, node, rank, local_rank"

# Heard of within two exports or scrapes of 60 s, and what they take, as for the rules
# (deploy/prometheus): a dead rank's last value stays visible for five minutes.
ALIVE_S = 150
# The interval of the rules that boards integrate: a sum over recorded values times this is an
# integral over time.
RULES_EVERY_S = 30
# Those of fleet.yml that say which runs there are.
SEEN_EVERY_S = 300
