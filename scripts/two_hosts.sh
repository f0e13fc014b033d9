#!/usr/bin/env bash
# Two network namespaces as two hosts: each has its own address, its own host name that the other cannot resolve, and
# one link between them. The rendezvous of scripts/slurm/node.sh must bring their ranks together over it, and the run
# must lose what it loses on one host, to the last bit.
#   sudo bash scripts/two_hosts.sh        needs root, iproute2 and util-linux; leaves nothing behind
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/slurm/lib.sh
use_repository_python    # which scripts/quickstart.sh has made, or the active one
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
tag=mf$$
work=$(mktemp -d)
children=()

clean_up() {
    for pid in "${children[@]}"; do kill "$pid" 2>/dev/null || true; done
    for host in a b; do ip netns delete "$tag-$host" 2>/dev/null || true; done    # the link goes with them
    rm -rf "$work"
}
trap clean_up EXIT

say "Two hosts, 10.244.7.1 and 10.244.7.2, and a link between them"
ip netns add "$tag-a"
ip netns add "$tag-b"
ip link add "$tag-0" netns "$tag-a" type veth peer name "$tag-1" netns "$tag-b"
end=0
for host in a b; do
    ip -n "$tag-$host" address add "10.244.7.$((end + 1))/24" dev "$tag-$end"
    ip -n "$tag-$host" link set "$tag-$end" up
    ip -n "$tag-$host" link set lo up
    end=$((end + 1))
done
ip netns exec "$tag-a" bash -c 'exec 3<>/dev/tcp/10.244.7.2/9' 2>"$work/refused" || true    # nobody listens there
grep -q "refused" "$work/refused" || { echo "error: the hosts do not see each other: $(cat "$work/refused")" >&2; exit 1; }

say "A corpus of bytes: this project's own pages"
cat README.md docs/*.md >"$work/pages.txt"
python -m megafour prepare "$work/pages.txt" --tokenizer bytes --split-text blank-line --workers 1 \
    --output "$work/corpus"
settings=(model.num_layers=2 model.hidden_size=64 model.num_attention_heads=4 model.num_key_value_heads=2
    model.ffn_hidden_size=96 "data.train=[{path: $work/corpus}]" data.seq_length=64 data.tokenizer=null
    parallel.pp=1 parallel.tp=2 parallel.cp=1 train.steps=4 train.global_batch_size=4 train.precision=fp32
    lr_schedule.warmup_steps=0 eval.every=0 data.split=null logging.tensorboard=false run.device=cpu)

cat >"$work/start" <<'START'
hostname "$1" && shift && exec bash scripts/slurm/node.sh "$@"
START
host() {    # host NAME NUMBER — what srun starts on a node, with the variables that it sets there
    local end=$2
    # gloo would ask what this host's name means and find nothing; on a cluster NCCL_SOCKET_IFNAME is its sister.
    GLOO_SOCKET_IFNAME=$tag-$end SLURM_JOB_NUM_NODES=2 SLURM_NODEID=$end SLURMD_NODENAME=10.244.7.$((end + 1)) \
        SLURM_STEP_ID=0 SLURM_PROCID=$end SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 \
        HEAD_NODE=10.244.7.1 HEAD_PORT=29400 RENDEZVOUS_ID=$tag RANKS_PER_NODE=2 \
        ip netns exec "$tag-$1" unshare --uts bash "$work/start" "host-$1" \
        --config configs/quickstart.yaml "run.dir=$work/two" "${settings[@]}" >"$work/host-$1.log" 2>&1 &
    children+=($!)
}

say "dp2-tp2: two ranks on each host"
host b 1        # the head node comes last: the other one has to wait for it
sleep 2
host a 0
for pid in "${children[@]}"; do
    wait "$pid" || { cat "$work"/host-*.log >&2; exit 1; }
done
cat "$work/host-a.log"

say "The same on one host"
python -m torch.distributed.run --standalone --nproc-per-node 4 \
    train.py --config configs/quickstart.yaml "run.dir=$work/one" "${settings[@]}" >"$work/one.log" 2>&1 ||
    { cat "$work/one.log" >&2; exit 1; }

python - "$work" <<'PY'
import json, pathlib, sys
two, one = ([json.loads(line)["loss"] for line in pathlib.Path(sys.argv[1], run, "metrics.jsonl").read_text().splitlines()]
            for run in ("two", "one"))
print("two hosts", two, "one host ", one, sep="\n")
sys.exit(0 if two == one and len(two) == 4 else "error: the losses differ")
PY
say "Done: the same losses to the last bit"
