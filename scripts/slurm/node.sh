#!/usr/bin/env bash
# One node's part of a job: torchrun with this node's ranks. srun starts it once a node; pretrain.sbatch exports what
# it reads: HEAD_NODE, HEAD_PORT, RANKS_PER_NODE, RENDEZVOUS_ID, and optionally MAX_RESTARTS and SHUTDOWN_TIMEOUT.
#   node.sh --config FILE [section.key=value ...]
set -euo pipefail

# A bare SIGUSR1 would kill the agent and orphan its ranks. Ignored here it is ignored by the agent; the ranks set a
# handler of their own, so that a signal to the whole step still reaches them.
trap '' USR1

# On a restart the node whose rank failed counts one more than the others, and torch would look for each other's
# addresses under that count in the rendezvous' store: each restart gets a store of its own instead.
[ "${MAX_RESTARTS:-0}" = 0 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# is_host: said outright, since torchrun's own guess compares host names, and a node may have several.
# local-addr: the name that the node list has; the fully qualified one is not always one that other nodes can resolve.
# read_timeout: how long a node may start before the head node does, as when an image is still being loaded there.
exec python -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:$HEAD_PORT" --rdzv-id "$RENDEZVOUS_ID" \
    --rdzv-conf "is_host=$([ "$SLURM_NODEID" = 0 ] && echo true || echo false),read_timeout=300" \
    --local-addr "$SLURMD_NODENAME" \
    --max-restarts "${MAX_RESTARTS:-0}" --shutdown-timeout "${SHUTDOWN_TIMEOUT:-55}" \
    train.py "$@"
