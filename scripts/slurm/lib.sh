# Shared by the batch scripts: the repository's folder, its Python, and what a job's node list says.
# shellcheck shell=bash

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }
die() { printf 'error: %s\n' "$2" >&2; exit "$1"; }

# use_repository_python — the environment that was active at sbatch (sbatch passes it on), else .venv of scripts/lib.sh.
use_repository_python() {
    if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/python ]; then
        PATH=$PWD/.venv/bin:$PATH
    fi
    command -v python >/dev/null || die 1 "no python on the PATH of $(hostname), and no .venv in $PWD"
}

# head_node — the first node of the job; every node computes the same one.
head_node() { scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p; }    # head would leave before scontrol is done

# ranks_per_node — one for each GPU of a node; a CPU run says RANKS_PER_NODE.
ranks_per_node() {
    local ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    [ -n "$ranks" ] || ranks=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    [[ $ranks =~ ^[1-9][0-9]*$ ]] ||
        die 2 "no GPU on $(hostname): submit with --gpus-per-node N, or set RANKS_PER_NODE=N for a run on CPUs"
    echo "$ranks"
}

# job_port — differs between jobs that share a node and between the starts of one job; below the ports that
# Linux hands out by itself (32768 and up).
job_port() { echo $((15000 + (SLURM_JOB_ID * 8 + ${SLURM_RESTART_COUNT:-0}) % 15000)); }
