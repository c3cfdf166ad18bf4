"""All thresholds of the straggler detector.

The thresholds of the rule are set by reasoning, given here. The thresholds of phases, hosts and
recurring stalls are fitted to recorded trainings: `tools/diagnosis_cases.py` and
`tools/device_cases.py` make the tables in docs/internals/diagnosis.md. Run both after a change.
"""

from __future__ import annotations

# -- alignment of the ranks' steps

# The agent reads one process after the other, so one rank's steps may be read far ahead of the
# others'. If some ranks have not reported a step, it is dropped once this many later steps are
# known.
MOST_WAITING = 1000
# The step numbers of the ranks do not match if every rank has made this many steps and no number
# was common to all.
COUNT_DIFFERENTLY_AFTER = 50
# A rank counts as silent if it has made no step while another rank made this many.
SILENT_AFTER = 200
# The ranks are not compared if less than this share of the recent steps was read from all of them.
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
# As shares of the median step. A verdict opens if the excess (the time per step beyond the other
# ranks') is above EXCESS, and above EXCESS_PER_WINDOW in each of the three windows. It closes below
# EXCESS_OVER.
EXCESS = 0.05
EXCESS_PER_WINDOW = 0.025
EXCESS_OVER = 0.025
# While a verdict is open, the new steps add to its cost only if their excess is above STILL times
# the EWMA of the excess. A smaller excess is noise of a rank that has recovered. STILL_FOLLOWS is
# the EWMA factor.
STILL = 0.25
STILL_FOLLOWS = 0.05
# A verdict opens only if each window's excess is at least this share of the largest one in any
# window.
ALIKE = 0.4
# A rank may have rare long pauses, which do not make it a late rank. So up to this share of its
# steps is left out of its mean excess as pauses.
PAUSES = 0.05
# In nanoseconds: a verdict opens only above EXCESS_NS, as clocks, hooks and the scheduler cause
# smaller excesses, and closes below EXCESS_OVER_NS.
EXCESS_NS = 500_000
EXCESS_OVER_NS = 250_000
# By chance, a rank is slower than the others in half of the steps. A late rank must be slower in
# more: by this many standard deviations of a fair coin, i.e. in 78 % of 90 steps or 65 % of 300.
SIGMAS = 5.3
# If 90 steps take longer than SOON_NS, fewer steps suffice: as many as fit in SOON_NS, but at least
# SOON_FEWEST. In exchange, the excess must be above EXCESS_PER_WINDOW in each step, and in each
# window above SOON_SIGMAS times the standard deviation of the rank's (or node's) own excess over
# the last LENGTHS[0] steps.
SOON_NS = 12 * 10**9
SOON_FEWEST = 12
SOON_SIGMAS = 5.0
# The first steps of a process are not compared: it allocates, compiles, and starts workers.
FIRST_STEPS = 20
# If more than this share of the ranks are unusual in a step (compile, save, ...), the step is not
# compared; otherwise only the unusual ranks are left out. With fifteen ranks or fewer, one unusual
# rank is enough to exclude the step.
UNUSUAL = 1 / 16
# The phase of an open verdict changes after CHECKS consecutive checks that find the same new phase.
# The checks are CHECK_EVERY steps apart.
CHECKS = 3
CHECK_EVERY = 30

# -- waits in calls to process groups

# Calls to process groups are ignored after this many consecutive steps in which they did not show
# who waits for whom.
CALLS_FAIL = 10
# To name the calls in which others wait for a late rank, this many of the last steps are examined.
CALLS_KEPT = 9
# To name the calls in which others wait for a late node, at most this many of its ranks are
# examined, and each is compared with at most this many other ranks.
CALLS_ALIKE = 8

# -- the rule for nodes: that for ranks, with the median of the ranks of a node; all must be late

# Each rank of a late node is late by at least this share of the node's excess.
NODE_ALIKE = 0.5
# A node is late only if at most this share of the ranks on other nodes is as late as its ranks.
NODE_OTHERS = 1 / 8
# Each rank of a late node is also late by at least this share of the excess of its latest rank.
# Otherwise, on a node with two ranks, a single late rank would make the node look late: it raises
# the median of the two by half of its own excess.
NODE_OF_LATEST = 1 / 3
# A node is not called late if its ranks outnumber those of all other nodes by more than this
# factor: one fast rank elsewhere does not make a node of eight late.
NODE_OUTNUMBERS = 2
# If the ranks of a node are late by similar amounts, their own verdicts wait for this many steps,
# as one verdict on the node may replace them.
NODE_WAITS = 60
# With more ranks or nodes than this, the usual time is estimated from a sample of about this many.
COMPARED_WITH = 64
# From this number of ranks on, memory and CPU time are saved: steps are stored as packed arrays,
# and the report is computed only every STRIDE steps, from a smaller sample.
MANY_RANKS = 256
# A verdict tells how long a step would take without late ranks if that saves at least this share.
WHAT_IF = 0.01

# -- phase and side of a late rank

# A verdict names a phase, or unequal work, as the cause if that accounts for this share of the
# excess. Hysteresis: it takes PHASE_MARGIN more to change an open verdict, and PHASE_MARGIN less to
# keep it.
PHASE_MOST_OF = 0.7
PHASE_MARGIN = 0.15
# Forward and backward count as equally slow if the relative excess of one is at least this share of
# the other's. Then the phase is `compute`.
PHASE_ALIKE = 0.5
# A device's lag behind its host shows how much work is queued. It is little if the lag is at most
# SIDE_FEW times the lag of other devices. It is no more than usual if the lag exceeds theirs by at
# most SIDE_MORE of the rank's excess.
SIDE_FEW, SIDE_MORE = 0.5, 0.2

# -- recurring stalls

# A stall is an excess in one step above RECURS_OF_STEP of the step and above RECURS_SHORTEST_NS.
# Clocks and the scheduler cause smaller ones.
RECURS_OF_STEP = 0.5
RECURS_SHORTEST_NS = 2_000_000
# Stalls that are at most this many steps apart are merged into one.
RECURS_APART = 3
# A stall counts only if the other ranks wait for at least this share of it. If hosts are ahead of
# their devices, they may stall in turn without making any other rank wait.
RECURS_WAITED = 0.5
# Stalls recur if the distances of the last RECURS_REGULAR stalls have a coefficient of variation
# below RECURS_ALIKE. Pauses at random times are as regular once in a million cases.
RECURS_REGULAR, RECURS_ALIKE = 7, 0.05
# Stalls that all ranks have are not one rank's fault. So a verdict opens only if the typical other
# rank stalls in the same phase for at most this share of the time for which this rank stalls.
RECURS_OF_OTHERS = 0.1
# The figures of a verdict are those of the last RECURS_SHOWN stalls. The verdict closes if the
# distances of these have a coefficient of variation above RECURS_ALIKE_STILL, or if no stall came
# for RECURS_OVERDUE times their longest distance.
RECURS_SHOWN = 30
RECURS_ALIKE_STILL = 0.5
RECURS_OVERDUE = 2.5
# A verdict opens if stalls take more than RECURS_COST of the time, and closes below RECURS_STILL.
RECURS_COST, RECURS_STILL = 0.05, 0.025
# A stall belongs to the phase that has at least this share of it; without such a phase it is
# `mixed`.
RECURS_MOST_OF = 0.7

# -- hosts that pace their devices

# EWMA factor for the share of the step in which a device idles for an unknown reason.
PACE_FORGETS = 0.02
# If a host needs longer than the others in a phase, but by less than 1/PACE_SMALL of the step, that
# is ignored.
PACE_SMALL = 64
# Two hosts launch equally fast if the faster one needs at least this share of the slower one's
# time.
PACE_ALIKE = 0.9
# The usual time of a host in a phase starts as the median of this many first steps.
NEED_BEGINS = 20
# Each later step changes the usual time by this EWMA factor. A step longer than NEED_FAR times the
# usual time counts only as that.
NEED_FOLLOWS = 0.05
NEED_FAR = 3.0
# If this many consecutive steps are longer than NEED_FAR times the usual time, they are no
# outliers: the shortest of them becomes the usual time.
NEED_STAYS = 10
# While a loader has batches ready, its speed does not show: the host does not wait. The longest
# wait so far is used instead. It is kept for at least this many steps, as one of several equally
# fast loaders may stay ahead for that long.
NEED_SHOWN_STEPS = 10_000
# EWMA factor of the waits for batches: a few slow batches do not make a loader slow.
NEED_SHOWS = 0.02
# A loader has prefetched batches if its host waits less than this share of its longest wait so far:
# all ranks go at one pace, so a shorter wait does not mean a faster loader.
NEED_AHEAD = 0.95
# A loader has batches ready if its host waits for less than this share of its longest wait. Its
# speed may then have shown only in the first steps: it is taken as the NEED_SHOWN_IN-th longest
# wait of these.
NEED_READY = 0.5
NEED_SHOWN_IN = 4
# Slow first batches of a loader are ignored if the loader that it is compared with had slow first
# batches too, i.e. this many times slower than its later ones.
NEED_STARTS_SLOWLY = 1.5
# Every NEED_CHECK_EVERY steps, the last NEED_WAITS_STEPS steps are examined for whether the host
# waits for its device between steps.
NEED_CHECK_EVERY = 10
NEED_WAITS_STEPS = 60
# This share of the gaps between steps is ignored as outliers.
NEED_ODD = 0.1
# A host waits for its device between steps if the time between steps, minus the device's lag,
# varies at most this many times as much as the time itself. If it varies no less, the host does not
# wait.
NEED_CLEARLY_LESS = 0.6
# Variations of a duration below this are taken as zero.
NEED_TICK_NS = 50_000
# A device has caught up with its host if its remaining lag is below NEED_TICK_NS plus
# 1/NEED_DONE_PART of the lag that it had when the gap between the steps began.
NEED_DONE_PART = 64
# If the host holds the device up for at least this share of forward, backward and optimizer, the
# host's time in these phases is its launch time: no full launch queue has blocked the host.
LAUNCH_KEEPS_UP = 0.8
# The usual launch time is the median of the last steps that showed it: at least LAUNCH_FEWEST, at
# most LAUNCH_MOST, and none older than LAUNCH_SHOWN_STEPS steps.
LAUNCH_FEWEST, LAUNCH_MOST = 3, 30
LAUNCH_SHOWN_STEPS = 2_000
# A usual launch time above this many times the present step is outdated: launching a step cannot
# take longer than the step.
LAUNCH_OUTDATED = 1.25
