"""All limits of the detector of late ranks.

Those of the rule are chosen, for the reasons that stand beside them. Those of phases, hosts and
recurring stalls are fitted to recorded trainings: docs/internals/diagnosis.md has the tables, and
`tools/diagnosis_cases.py` and `tools/device_cases.py` make them. Run both after a change.
"""

from __future__ import annotations

# -- the same step of all ranks

# The agent reads one process after the other, so one rank may be far ahead in what was read.
# A step that is further behind than this many is not waited for.
MOST_WAITING = 1000
# After so many steps of every rank without a common one, the ranks count differently.
COUNT_DIFFERENTLY_AFTER = 50
# A rank without a step in so many steps of another one has gone silent.
SILENT_AFTER = 200
# Where fewer of the last steps than this are known of all ranks, they are not comparable.
LEAST_IN_COMMON = 0.5

# Where so many steps lie between two that all ranks have measured, their numbers have nothing in
# common. Of 64 steps one is measured, and there are never 200 between two.
MOST_UNMEASURED = 1000

# -- the rule: when a rank is late

# A clear case shows in three windows of 30 steps; what hides in jitter takes longer windows.
LENGTHS = (90, 120, 300)
WINDOWS = 3
# The rule looks at the steps every so many of them, but not again before this time has passed: the
# agent reads twice a second, so more looks at fast steps would tell hardly anything sooner.
STRIDE = 10
LOOK_NS = 200_000_000
# Shares of the median step: for a verdict, in each of its three windows, and to end it.
EXCESS = 0.05
EXCESS_PER_WINDOW = 0.025
EXCESS_OVER = 0.025
# With an open verdict, the newest steps count where their excess is this share of what it was: that
# of a rank that has recovered is noise. What it was follows this fast, by look.
STILL = 0.25
STILL_FOLLOWS = 0.05
# The smallest window's excess, as a share of the largest window's.
ALIKE = 0.4
# Pauses of a rank are rare: at most in this share of the steps.
PAUSES = 0.05
# Clocks, hooks and the kernel's scheduling make differences below this; less of it ends a verdict.
EXCESS_NS = 500_000
EXCESS_OVER_NS = 250_000
# The share of steps in which the rank is above the others must lie this far above one half.
# The unit is the standard deviation of a fair coin. That makes 78 % of 90 steps, 65 % of 300.
SIGMAS = 5.3
# Where 90 steps take longer than this, fewer do: as many as take this long, but at least so many.
# Then each one is above EXCESS_PER_WINDOW, and each window so many times above what moves the rank
# or the node by itself: its standard deviation over the shortest of LENGTHS.
SOON_NS = 12 * 10**9
SOON_FEWEST = 12
SOON_SIGMAS = 5.0
# The first steps of a process allocate, compile, and start workers.
FIRST_STEPS = 20
# A step is left out where more than this share of the ranks have something unusual in it. Else
# these ranks alone are. Of fifteen ranks or fewer, one is enough.
UNUSUAL = 1 / 16
# An open verdict changes its phase after so many checks that agree, each so many steps apart.
CHECKS = 3
CHECK_EVERY = 30

# -- what ranks wait for in calls to process groups

# Calls are ignored after so many consecutive steps in which it is unknown who waits for whom.
CALLS_FAIL = 10
# The number of steps that show in which calls others wait for a late rank.
CALLS_KEPT = 9
# The number of ranks of a node that are examined for that, each beside as many others.
CALLS_ALIKE = 8

# -- the rule for a node: as for a rank, by the median of its ranks; and they are late alike

# Each of its ranks is late by at least this share of what the node is late by. Of the ranks on the
# other nodes, at most this share is: a late rank among them is another matter.
NODE_ALIKE = 0.5
# And by at least this share of what its latest rank is: of two ranks, one alone makes half a node.
NODE_OF_LATEST = 1 / 3
NODE_OTHERS = 1 / 8
# It has at most so many times as many ranks as all other nodes together: one fast rank beside a
# node of eight makes none of these late.
NODE_OUTNUMBERS = 2
# Where the ranks of a node are late alike, each waits so many steps for the verdict on the node.
NODE_WAITS = 60
# Of very many ranks or nodes, so many tell what is usual. That costs a hundredth of a deviation.
COMPARED_WITH = 64
# So many ranks are very many: their steps are kept packed, and how all compare is worked out anew
# once a stride, from fewer steps.
MANY_RANKS = 256
# The duration of a step without the late ranks is shown if it is shorter by this share.
WHAT_IF = 0.01

# -- its phase, and the side that is late

# A phase, or unequal work, explains an excess when it holds this share of it. For another answer
# than the one that was given, it takes so much more of it; for the same answer, so much less.
PHASE_MOST_OF = 0.7
PHASE_MARGIN = 0.15
# Forward and backward are slow alike where one is slower by at least this share of the other.
PHASE_ALIKE = 0.5
# A device has little work left if it is behind its host by at most this share of what others are
# behind theirs; and no more than others if it is so by at most this share of the excess more.
SIDE_FEW, SIDE_MORE = 0.5, 0.2

# -- stalls that recur

# The least excess of a stall, as a share of a step.
RECURS_OF_STEP = 0.5
# What is shorter comes from clocks and scheduling.
RECURS_SHORTEST_NS = 2_000_000
# The most steps between two steps of one stall.
RECURS_APART = 3
# The least share of a stall for which the others wait: hosts that run ahead of their devices stand
# still in turn, and none waits for another.
RECURS_WAITED = 0.5
# How alike the distances between so many last stalls must be, as standard deviation by mean. Of a
# million pauses at random one has such distances before it.
RECURS_REGULAR, RECURS_ALIKE = 7, 0.05
# The stalls of the typical other rank in that phase are at most this share of its own.
RECURS_OF_OTHERS = 0.1
# So many of the last stalls make the figures of a verdict. It ends where these are less alike than
# this, or where none came for so many times the longest distance.
RECURS_SHOWN = 30
RECURS_ALIKE_STILL = 0.5
RECURS_OVERDUE = 2.5
# The share of the time that they take from the others: to report them, and to end the verdict.
RECURS_COST, RECURS_STILL = 0.05, 0.025
# The phase of a stall is the one that holds this share of it.
RECURS_MOST_OF = 0.7

# -- hosts: the pace at which all go

# How fast the share of the step that is not told as lateness is forgotten.
PACE_FORGETS = 0.02
# What a host needs more in a phase is none where it is less than one part of the step in so many.
PACE_SMALL = 64
# Hosts launch alike if the one needs at least this part of what the other needs.
PACE_ALIKE = 0.9
# What a host usually needs is the median of its first steps.
NEED_BEGINS = 20
# From then on its usual time follows it this fast, and no pause moves it by more than this.
NEED_FOLLOWS = 0.05
NEED_FAR = 3.0
# So many steps in a row that are all further away are no pause: it takes what all of them take.
NEED_STAYS = 10
# A loader that has batches ready hides how long it needs for one. What it has shown of that before
# counts for at least so many steps: equal loaders take thousands to change their places.
NEED_SHOWN_STEPS = 10_000
# It follows this fast what the host waits, so that no loader is slow by chance.
NEED_SHOWS = 0.02
# The loader is ahead of the host if this waits less than this part of what the loader has shown:
# all ranks go at one pace, so a shorter wait is a lead, and no faster loader.
NEED_AHEAD = 0.95
# It has batches ready if the host waits less than this part. Then it may have shown what it needs
# in so many of the first steps alone: among many ranks equal loaders are soon ahead of the slowest.
NEED_READY = 0.5
NEED_SHOWN_IN = 4
# But not where first batches take longer than later ones, also on the rank that waits: by this.
NEED_STARTS_SLOWLY = 1.5
# Whether a host waits for its device between steps is looked at this often, over so many steps.
NEED_CHECK_EVERY = 10
NEED_WAITS_STEPS = 60
# So much of the steps may be out of the ordinary.
NEED_ODD = 0.1
# It waits if its time between steps varies so much less without the wait, and does not if it varies
# as much.
NEED_CLEARLY_LESS = 0.6
# What varies by less than this does not vary.
NEED_TICK_NS = 50_000
# The device has done all if what is left is less than a tick, or than one part in so many.
NEED_DONE_PART = 64
# A device that keeps up with its host for this part of a step's computing shows what the host
# needs: the host was not held up by a full queue of launches.
LAUNCH_KEEPS_UP = 0.8
# It takes so many such steps. The last ones count, for so many steps.
LAUNCH_FEWEST, LAUNCH_MOST = 3, 30
LAUNCH_SHOWN_STEPS = 2_000
# A host cannot need longer than a step takes now: what it has shown is out of date then.
LAUNCH_OUTDATED = 1.25
