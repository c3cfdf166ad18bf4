"""All thresholds of the straggler detector.

Those of the rule are chosen, for the reasons given here. Those of phases, hosts and recurring
stalls are fitted to recorded trainings: docs/internals/diagnosis.md has the tables, which
`tools/diagnosis_cases.py` and `tools/device_cases.py` make. Run both after a change.
"""

from __future__ import annotations

# -- alignment of the ranks' steps

# The agent reads one process after the other, so one rank may be far ahead. A step is dropped if it
# is incomplete after this many further ones.
MOST_WAITING = 1000
# If every rank has made this many steps without a common number, the numbers do not match.
COUNT_DIFFERENTLY_AFTER = 50
# A rank without a step during this many steps of another one has gone silent.
SILENT_AFTER = 200
# If fewer of the recent steps are known of all ranks, they are not comparable.
LEAST_IN_COMMON = 0.5
# The most steps between two that all ranks have measured. At one in 64, there are never 200.
MOST_UNMEASURED = 1000

# -- the rule: when a rank is late

# A clear case shows in three windows of 30 steps; one hidden by jitter takes longer windows.
LENGTHS = (90, 120, 300)
WINDOWS = 3
# The rule is applied every STRIDE steps, but not more often than this: the agent reads twice a
# second, so checking fast steps more often would report hardly anything sooner.
STRIDE = 10
LOOK_NS = 200_000_000
# Shares of the median step: to open a verdict, in each of its three windows, and to close it.
EXCESS = 0.05
EXCESS_PER_WINDOW = 0.025
EXCESS_OVER = 0.025
# While a verdict is open, new steps add to its cost if their excess is above STILL times its
# EWMA: less is the noise of a rank that has recovered. STILL_FOLLOWS: the EWMA factor, by check.
STILL = 0.25
STILL_FOLLOWS = 0.05
# The least excess of a window, as a share of the largest window's.
ALIKE = 0.4
# Pauses of a rank are rare: at most this share of the steps.
PAUSES = 0.05
# Clocks, hooks and the scheduler make smaller differences. Less than EXCESS_OVER_NS closes a
# verdict.
EXCESS_NS = 500_000
EXCESS_OVER_NS = 250_000
# The share of steps in which the rank is above the others exceeds one half by this many standard
# deviations of a fair coin: 78 % of 90 steps, 65 % of 300.
SIGMAS = 5.3
# If 90 steps take longer than this, fewer suffice: as many as take this long, but at least
# SOON_FEWEST. Then each step is above EXCESS_PER_WINDOW, and each window exceeds the unit's own
# standard deviation (over the shortest of LENGTHS) by SOON_SIGMAS.
SOON_NS = 12 * 10**9
SOON_FEWEST = 12
SOON_SIGMAS = 5.0
# The first steps of a process allocate, compile, and start workers.
FIRST_STEPS = 20
# A step is excluded if more than this share of the ranks are unusual in it; else only these ranks
# are. With fifteen ranks or fewer, one suffices.
UNUSUAL = 1 / 16
# An open verdict changes its phase after this many consecutive checks that agree, and the number of
# steps between checks.
CHECKS = 3
CHECK_EVERY = 30

# -- waits in calls to process groups

# Calls are ignored after this many consecutive steps in which it is unknown who waits for whom.
CALLS_FAIL = 10
# The number of steps that show in which calls others wait for a late rank.
CALLS_KEPT = 9
# The number of ranks of a node that are examined for that, each with as many others.
CALLS_ALIKE = 8

# -- the rule for nodes: as for a rank, by the median of its ranks; and they are late alike

# Each rank of a late node is late by at least this share of the node's excess. Of the ranks on
# other nodes, at most NODE_OTHERS are.
NODE_ALIKE = 0.5
# Each is also late by at least this share of the latest rank's excess: of two ranks, a single late
# one raises the node's median by half of its excess.
NODE_OF_LATEST = 1 / 3
NODE_OTHERS = 1 / 8
# A node cannot be late if it has more than this many times the ranks of all other nodes: one fast
# rank elsewhere does not make a node of eight late.
NODE_OUTNUMBERS = 2
# If the ranks of a node are late alike, their own verdicts wait this many steps for the node's.
NODE_WAITS = 60
# With more ranks or nodes, the usual is estimated from this many. Costs 1 % of a deviation.
COMPARED_WITH = 64
# From this number on, steps are stored packed, and the report is computed once a stride, from fewer
# steps.
MANY_RANKS = 256
# The step time without late ranks is shown if it is shorter by this share.
WHAT_IF = 0.01

# -- phase and side of a late rank

# A phase, or unequal work, explains an excess if it holds this share of it. Hysteresis: a new
# answer takes PHASE_MARGIN more, the present one less.
PHASE_MOST_OF = 0.7
PHASE_MARGIN = 0.15
# Forward and backward are slow alike if one is slower by at least this share of the other.
PHASE_ALIKE = 0.5
# A device has little work left if its lag is at most SIDE_FEW of the others' lag, and no more than
# they have if its lag exceeds theirs by at most SIDE_MORE of the excess.
SIDE_FEW, SIDE_MORE = 0.5, 0.2

# -- recurring stalls

# The least excess of a stall, as a share of a step; and absolute: less is due to clocks and
# scheduling.
RECURS_OF_STEP = 0.5
RECURS_SHORTEST_NS = 2_000_000
# The most steps between two steps of one stall.
RECURS_APART = 3
# The least share of a stall for which the others wait. Hosts ahead of their devices may stall in
# turn without making others wait.
RECURS_WAITED = 0.5
# The last RECURS_REGULAR stalls recur if the coefficient of variation of their distances is below
# RECURS_ALIKE. Random pauses are that regular once in a million.
RECURS_REGULAR, RECURS_ALIKE = 7, 0.05
# The typical other rank stalls at most this share of the time in the same phase.
RECURS_OF_OTHERS = 0.1
# The number of stalls for the figures of a verdict. It closes if they become less regular than
# this, or if the next is overdue by this many times the longest distance.
RECURS_SHOWN = 30
RECURS_ALIKE_STILL = 0.5
RECURS_OVERDUE = 2.5
# The share of the time that they cost the others: to open the verdict, and to close it.
RECURS_COST, RECURS_STILL = 0.05, 0.025
# The phase of a stall holds at least this share of it.
RECURS_MOST_OF = 0.7

# -- hosts that pace their devices

# EWMA factor of the unclear share of the step.
PACE_FORGETS = 0.02
# Extra time of a host in a phase is ignored below this part of the step.
PACE_SMALL = 64
# Hosts launch alike if one needs at least this share of the other's time.
PACE_ALIKE = 0.9
# The usual time of a host starts as the median of its first steps.
NEED_BEGINS = 20
# Then it follows by this EWMA factor; a step counts as at most NEED_FAR times the usual.
NEED_FOLLOWS = 0.05
NEED_FAR = 3.0
# After this many consecutive steps above that, it jumps to the least of them.
NEED_STAYS = 10
# A loader with batches ready hides how long it takes. What it has shown counts for at least this
# many steps: equal loaders need thousands to change places.
NEED_SHOWN_STEPS = 10_000
# EWMA factor of the waits for batches, so that no loader is slow by chance.
NEED_SHOWS = 0.02
# The loader is ahead if its host waits less than this share of what the loader has shown: all ranks
# go at one pace, so a shorter wait is a lead, not a faster loader.
NEED_AHEAD = 0.95
# It has batches ready if the host waits less than this share. Then the time it takes may have shown
# in only NEED_SHOWN_IN of the first steps: equal loaders soon get ahead of the slowest.
NEED_READY = 0.5
NEED_SHOWN_IN = 4
# Unless first batches take this many times longer than later ones, also on the rank that waits.
NEED_STARTS_SLOWLY = 1.5
# How often, and over how many steps, to check whether a host waits for its device between steps.
NEED_CHECK_EVERY = 10
NEED_WAITS_STEPS = 60
# The share of outliers to ignore.
NEED_ODD = 0.1
# A host waits for its device if its time between steps varies less without the wait than with it,
# by this factor at least. It does not wait if both vary alike.
NEED_CLEARLY_LESS = 0.6
# Less is no variation.
NEED_TICK_NS = 50_000
# A device has caught up if its remaining lag is below a tick or this part of the lag.
NEED_DONE_PART = 64
# If a device is bound by its host for this share of a step's compute, the host's time shows what it
# needs to launch: it was not blocked by a full queue.
LAUNCH_KEEPS_UP = 0.8
# The number of such steps that are needed and used, and for how many steps they count.
LAUNCH_FEWEST, LAUNCH_MOST = 3, 30
LAUNCH_SHOWN_STEPS = 2_000
# Outdated if above this many times the present step: a host cannot need longer than a step.
LAUNCH_OUTDATED = 1.25
