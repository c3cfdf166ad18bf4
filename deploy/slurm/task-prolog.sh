#!/bin/bash
# Gives each task of a Slurm job the variables by which its run is found again: group, project and
# name from Slurm's own, the collector from the site's. Nothing here is needed to record a run.
#
# For all jobs, in slurm.conf:  TaskProlog=/etc/otel-ddp/task-prolog.sh
# For one job:                  srun --task-prolog=deploy/slurm/task-prolog.sh ...
#
# Slurm runs it as the user, before each task, and takes the lines "export NAME=value" that it
# prints. What the user has set wins, under whichever of its names.

set -u

# The site's own, a shell file: COLLECTOR=https://collector.example.org:4318 and SHARED_NODES=yes
# Read in a shell of its own: a task whose prolog fails is not started, and what is wrong with this
# file shall cost nothing but what stands below the mistake. What it prints is for Slurm, too.
site=${1:-/etc/otel-ddp/slurm.sh}
exec 3>&1
{
    read -r COLLECTOR
    read -r SHARED_NODES
} < <(
    COLLECTOR=
    SHARED_NODES=no
    trap 'printf "%s\n" "${COLLECTOR-}" "${SHARED_NODES-}"' EXIT
    set +u
    # shellcheck source=/dev/null
    [[ -r $site ]] && . "$site" >&3
)

# give NAME VALUE [OTHER_NAME...]: nothing where one of the names is set already.
give() {
    local name=$1 value=$2 each
    for each in "$name" "${@:3}"; do
        [[ -z ${!each:-} ]] || return 0
    done
    # Slurm reads lines: a job may be named with whatever its user likes.
    value=${value//[$'\n\r']/ }
    [[ -z $value ]] || printf 'export %s=%s\n' "$name" "$value"
}

give OTEL_EXPORTER_OTLP_ENDPOINT "$COLLECTOR" \
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT OTEL_EXPORTER_OTLP_TRACES_ENDPOINT \
    OTEL_EXPORTER_OTLP_LOGS_ENDPOINT

# What belongs together: the tasks of an array, the restarts of a job, all jobs of one name.
give OTEL_DDP_GROUP "${SLURM_JOB_NAME:-}" SWANLAB_GROUP WANDB_RUN_GROUP
give OTEL_DDP_PROJECT "${SLURM_JOB_ACCOUNT:-}" SWANLAB_PROJ_NAME WANDB_PROJECT
give OTEL_DDP_NAME "${SLURM_JOB_NAME:-} ${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" \
    SWANLAB_NAME SWANLAB_EXP_NAME WANDB_NAME

# Where several jobs of one user share a node, each has an agent of its own: one that was started
# within the first job sees only that job's GPUs, and ends with it. epilog.sh clears up after it.
# Where a job has its nodes to itself this is left alone: what one job's agent could not deliver is
# then delivered by the next one's.
if [[ $SHARED_NODES == yes && -n ${SLURM_JOB_ID:-} ]]; then
    give OTEL_DDP_DIR "/dev/shm/otel_ddp-$(id -u)-job$SLURM_JOB_ID"
    # What an offline run keeps is to outlive the job.
    if [[ ${OTEL_DDP_AGENT:-} != offline ]]; then
        give OTEL_DDP_SPOOL_DIR "/var/tmp/otel_ddp-$(id -u)-job$SLURM_JOB_ID"
    fi
fi
exit 0
