"""All thresholds of the straggler detector.

The thresholds of the rule are chosen, for the reasons given here. The thresholds of phases, hosts
and recurring stalls are fitted to recorded trainings: docs/internals/diagnosis.md has the tables,
which `tools/diagnosis_cases.py` and `tools/device_cases.py` make. Run both after a change.
"""

from __future__ import annotations

# -- alignment of the ranks' steps

# The agent reads one process after the other, so one rank may be far ahead. A step that some ranks
# have not reported is dropped after this many later steps.
MOST_WAITING = 1000
# If every rank has made this many steps, and no step number was common to all, the ranks count
# their steps differently.
COUNT_DIFFERENTLY_AFTER = 50
# A rank without a step during this many steps of another one has gone silent.
SILENT_AFTER = 200
# The ranks are not compared if less than this share of the recent steps was read from all ranks.
LEAST_IN_COMMON = 0.5
# The ranks are not compared if none of this many steps was measured on all ranks. Even ranks that
# measure one of 64 steps measure a common step within 200 steps.
MOST_UNMEASURED = 1000

# -- the rule: when a rank is late

# The rule looks at the last 90, 120 or 300 steps, in three windows. A clear case shows in windows
# of 30 steps; a case hidden by jitter shows only in longer windows.
LENGTHS = (90, 120, 300)
WINDOWS = 3
# The rule is applied every STRIDE steps, but at most once in LOOK_NS: the agent reads twice a
# second, so applying it more often would report hardly anything sooner.
STRIDE = 10
LOOK_NS = 200_000_000
# As shares of the median step: a verdict opens if the excess is above EXCESS, and in each of the
# three windows above EXCESS_PER_WINDOW. It closes below EXCESS_OVER.
EXCESS = 0.05
EXCESS_PER_WINDOW = 0.025
EXCESS_OVER = 0.025
# While a verdict is open, new steps add to its cost if their excess is above STILL times the EWMA
# of the excess: less is the noise of a rank that has recovered. STILL_FOLLOWS is the EWMA factor.
STILL = 0.25
STILL_FOLLOWS = 0.05
# The excess in each window must be at least this share of the largest excess in any window.
ALIKE = 0.4
# At most this share of the steps is taken for pauses, which are left out of the mean excess.
PAUSES = 0.05
# The least excess to open a verdict: clocks, hooks and the scheduler cause smaller excesses. Below
# EXCESS_OVER_NS the verdict closes.
EXCESS_NS = 500_000
EXCESS_OVER_NS = 250_000
# The share of steps in which a late rank is above the others must exceed one half by this many
# standard deviations of a fair coin: 78 % of 90 steps, 65 % of 300.
SIGMAS = 5.3
# If 90 steps take longer than this, fewer suffice: as many as take this long, but at least
# SOON_FEWEST. Then the excess must be above EXCESS_PER_WINDOW in each step, and in each window
# above SOON_SIGMAS times the unit's own standard deviation (over the shortest of LENGTHS).
SOON_NS = 12 * 10**9
SOON_FEWEST = 12
SOON_SIGMAS = 5.0
# The first steps of a process are not compared: it allocates, compiles, and starts workers.
FIRST_STEPS = 20
# A step is excluded if more than this share of the ranks are unusual in it; else only the unusual
# ranks are excluded. With fifteen ranks or fewer, one unusual rank excludes the step.
UNUSUAL = 1 / 16
# An open verdict changes its phase after CHECKS consecutive checks that agree. There are
# CHECK_EVERY steps between two checks.
CHECKS = 3
CHECK_EVERY = 30

# -- waits in calls to process groups

# Calls are ignored after this many consecutive steps in which it is unknown who waits for whom.
CALLS_FAIL = 10
# The calls in which others wait for a late rank are found from this many of the last steps.
CALLS_KEPT = 9
# To find the calls in which others wait for a node, at most this many of its ranks are examined,
# each against at most this many others.
CALLS_ALIKE = 8

# -- the rule for nodes: that for ranks, applied to the median of a node's ranks; all must be late

# Each rank of a late node is late by at least this share of the node's excess.
NODE_ALIKE = 0.5
# At most this share of the ranks on other nodes is as late as the ranks of a late node.
NODE_OTHERS = 1 / 8
# Each rank of a late node is also late by at least this share of its latest rank's excess. Without
# this limit, a single late rank of two would raise the node's median by half of its own excess.
NODE_OF_LATEST = 1 / 3
# A node cannot be late if it has more than this many times the ranks of all other nodes: one fast
# rank elsewhere does not make a node of eight late.
NODE_OUTNUMBERS = 2
# If the ranks of a node are late alike, their own verdicts are held back for this many steps, in
# case that the node gets a verdict instead.
NODE_WAITS = 60
# With more ranks or nodes than this, the usual time is estimated from a sample of about this many.
COMPARED_WITH = 64
# From this number of ranks on, steps are stored as packed arrays, and the report is computed once a
# stride, from fewer steps.
MANY_RANKS = 256
# A verdict shows the step time without late ranks if that is shorter by at least this share.
WHAT_IF = 0.01

# -- phase and side of a late rank

# A phase, or unequal work, explains an excess if it accounts for this share of the excess.
# Hysteresis: to change the verdict takes PHASE_MARGIN more, to keep it PHASE_MARGIN less.
PHASE_MOST_OF = 0.7
PHASE_MARGIN = 0.15
# Forward and backward are slow alike if the relative excess of one is at least this share of the
# other's.
PHASE_ALIKE = 0.5
# A device has little work queued if its lag is at most SIDE_FEW of the others' lag. It has no more
# work queued than the others if its lag exceeds theirs by at most SIDE_MORE of the excess.
SIDE_FEW, SIDE_MORE = 0.5, 0.2

# -- recurring stalls

# The least excess of a stall, as a share of a step, and in nanoseconds: clocks and scheduling cause
# smaller excesses.
RECURS_OF_STEP = 0.5
RECURS_SHORTEST_NS = 2_000_000
# Stalls that are at most this many steps apart are merged into one.
RECURS_APART = 3
# A stall counts if the other ranks wait for at least this share of its length: hosts that are ahead
# of their devices may stall in turn without making other ranks wait.
RECURS_WAITED = 0.5
# The last RECURS_REGULAR stalls recur if the coefficient of variation of their distances is below
# RECURS_ALIKE. Random pauses are that regular once in a million.
RECURS_REGULAR, RECURS_ALIKE = 7, 0.05
# A rank's stalls get a verdict only if the typical other rank stalls in the same phase for at most
# this share of the rank's stall time.
RECURS_OF_OTHERS = 0.1
# The figures of a verdict come from the last RECURS_SHOWN stalls. A verdict closes if the
# coefficient of variation of their distances is above RECURS_ALIKE_STILL, or if no stall came for
# RECURS_OVERDUE times the longest distance.
RECURS_SHOWN = 30
RECURS_ALIKE_STILL = 0.5
RECURS_OVERDUE = 2.5
# The stalls' share of the time: above RECURS_COST a verdict opens, below RECURS_STILL it closes.
RECURS_COST, RECURS_STILL = 0.05, 0.025
# A stall has the phase in which at least this share of it lies; if there is none, it is `mixed`.
RECURS_MOST_OF = 0.7

# -- hosts that pace their devices

# EWMA factor of the share of the step in which a device idles for an unknown reason.
PACE_FORGETS = 0.02
# The extra time of a host in a phase is ignored if it is below 1/PACE_SMALL of the step.
PACE_SMALL = 64
# Two hosts launch alike if one needs at least this share of the other's time.
PACE_ALIKE = 0.9
# The usual time of a host starts as the median of its first steps.
NEED_BEGINS = 20
# Later steps change the usual time by this EWMA factor; each counts as at most NEED_FAR times the
# usual time.
NEED_FOLLOWS = 0.05
NEED_FAR = 3.0
# After this many consecutive steps above NEED_FAR times the usual time, the shortest of them is the
# new usual time.
NEED_STAYS = 10
# While a loader has batches ready, the time that it takes for a batch is hidden. Then the longest
# wait so far is used instead, for at least this many steps: loaders of equal speed may stay ahead
# of each other for that long.
NEED_SHOWN_STEPS = 10_000
# EWMA factor of the waits for batches: a few slow batches do not make a loader slow.
NEED_SHOWS = 0.02
# A loader is ahead if its host waits for less than this share of its longest wait so far: all ranks
# go at one pace, so a shorter wait comes from prefetched batches, not from a faster loader.
NEED_AHEAD = 0.95
# A loader has batches ready if its host waits for less than this share of its longest wait. The
# time that it takes for a batch may then have shown in only NEED_SHOWN_IN of the first steps.
NEED_READY = 0.5
NEED_SHOWN_IN = 4
# Slow first batches of a loader are ignored if the loader that it is compared with was slow at
# first too: if its first batches took this many times longer than its later ones.
NEED_STARTS_SLOWLY = 1.5
# Every NEED_CHECK_EVERY steps, the last NEED_WAITS_STEPS steps show whether a host waits for its
# device between steps.
NEED_CHECK_EVERY = 10
NEED_WAITS_STEPS = 60
# This share of the gaps between steps is ignored as outliers.
NEED_ODD = 0.1
# A host waits for its device if its time between steps varies less without the wait than with it,
# by this factor at least. It does not wait if both vary alike.
NEED_CLEARLY_LESS = 0.6
# Variations of a duration below this are taken as zero.
NEED_TICK_NS = 50_000
# A device has caught up if its remaining lag is below NEED_TICK_NS plus 1/NEED_DONE_PART of its lag
# at the start.
NEED_DONE_PART = 64
# If a device is bound by its host for this share of a step's compute, the host's time in the step
# is its launch time: no full launch queue has blocked the host.
LAUNCH_KEEPS_UP = 0.8
# The usual launch time needs at least LAUNCH_FEWEST steps that show it, and uses at most
# LAUNCH_MOST of the last LAUNCH_SHOWN_STEPS steps.
LAUNCH_FEWEST, LAUNCH_MOST = 3, 30
LAUNCH_SHOWN_STEPS = 2_000
# A launch time above this many times the present step is outdated: a host cannot need longer than a
# step.
LAUNCH_OUTDATED = 1.25
