#!/bin/bash
# Ends the node agent that a job has left behind, and clears away what was the job's alone. In
# slurm.conf:  Epilog=/etc/otel-ddp/epilog.sh
#
# Mostly there is nothing to do: with ProctrackType=proctrack/cgroup an agent ends with the step
# that started it. With proctrack/linuxproc or pgid it outlives the job, by OTEL_DDP_LINGER_S.
#
# Slurm runs it as root on each node of a job, with SLURM_JOB_UID and SLURM_JOB_ID. It calls no
# command of Slurm's, and trusts nothing that the user wrote: who lives and who does not is told by
# the locks in the kernel, and only a process of the job's own user is ended. It always exits with
# 0, because Slurm drains a node whose epilog fails.

set -u

# Where agents and trainings meet, and where undelivered data waits.
memory=${1:-/dev/shm}
disk=${2:-/var/tmp}
patience_s=10
uid=${SLURM_JOB_UID:-}
job=${SLURM_JOB_ID:-}
[[ $uid =~ ^[0-9]+$ && $job =~ ^[0-9]+$ ]] || exit 0

# holder FILE: the process that holds a lock on it, nothing where none does.
holder() {
    local device inode file
    # Without -L: a link in its place is not followed.
    read -r device inode < <(stat --format='%d %i' -- "$1" 2>/dev/null) || return 0
    printf -v file '%02x:%02x:%s' $(((device >> 8) & 0xfff)) \
        $(((device & 0xff) | ((device >> 12) & 0xfff00))) "$inode"
    # 1: POSIX ADVISORY WRITE 4711 00:1a:123 0 EOF     (who only waits has -> in the second place)
    awk -v file="$file" '$2 == "POSIX" && $4 == "WRITE" && $6 == file { print $5; exit }' /proc/locks
}

# in_use PLACE: whether a training process writes there; it may be another job of the same user.
in_use() {
    local journal
    for journal in "$1"/*.journal; do
        [[ -z $(holder "$journal") ]] || return 0
    done
    return 1
}

# end_agent PLACE: it is told to end, and waited for, since it delivers what is left.
end_agent() {
    local pid deadline=$((SECONDS + patience_s))
    pid=$(holder "$1/agent.lock")
    [[ $pid =~ ^[1-9][0-9]*$ ]] || return 0
    # The effective user of that process.
    [[ $(awk '$1 == "Uid:" { print $3 }' "/proc/$pid/status" 2>/dev/null) == "$uid" ]] || return 0
    kill -TERM "$pid" 2>/dev/null
    while [[ $(holder "$1/agent.lock") == "$pid" ]]; do
        if ((SECONDS >= deadline)); then
            kill -KILL "$pid" 2>/dev/null
            break
        fi
        sleep 0.1
    done
}

# own DIRECTORY: whether it is one, no link to one, and belongs to the job's user.
own() {
    [[ -d $1 && ! -L $1 && $(stat --format=%u -- "$1") == "$uid" ]]
}

for place in "$memory/otel_ddp-$uid"{,-offline,"-job$job"}; do
    if ! in_use "$place"; then
        end_agent "$place"
    fi
done

# What was the job's alone (task-prolog.sh, SHARED_NODES=yes) goes with it, and with that whatever
# the collector has not taken by now: nobody else would come for it.
for directory in "$memory/otel_ddp-$uid-job$job" "$disk/otel_ddp-$uid-job$job"; do
    if own "$directory" && ! in_use "$directory"; then
        rm -rf --one-file-system -- "$directory"
    fi
done
exit 0
