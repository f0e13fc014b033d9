#!/usr/bin/env bash
# The quick start: trains a small GPT on a real 4D mesh of sixteen processes (GPUs where there is one for each, else
# the CPU), goes on from its checkpoint on another mesh, and prints a sample. Minutes on two cores. Run again, it
# starts anew. Uses the active environment, or makes .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
use_environment
export OMP_NUM_THREADS=1    # sixteen processes: more threads than cores spin, and cost several times the time
corpus=data/quickstart/corpus

train() {    # train PROCESSES [section.key=value ...]
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1" \
        train.py --config configs/quickstart.yaml "${@:2}"
}

if [ ! -f "$corpus.idx" ]; then
    say "The corpus: Python's own documentation, about 2 MB of English text"
    "$PYTHON" scripts/quickstart_corpus.py data/quickstart/corpus.jsonl
    say "Training a tokenizer on it, and tokenizing it"
    "$PYTHON" -m megafour prepare data/quickstart/corpus.jsonl --output "$corpus" \
        --train-tokenizer 2048 --tokenizer sentencepiece:data/quickstart/tokenizer.model --overwrite
fi

rm -rf runs/quickstart      # what an earlier quick start left

say "Training on dp2-pp2-tp2-cp2: two replicas × two stages × two tensor ranks × two sequence halves, sixteen processes"
train 16 train.steps=110 eval.every=55

say "Resuming its checkpoint on another mesh, dp2-tp2: four processes hold the same model"
train 4 parallel.pp=1 parallel.tp=2 parallel.cp=1 train.steps=130

say "A sample of what it learned in these minutes"
"$PYTHON" -m megafour generate --checkpoint runs/quickstart --prompt "The following function returns" --max-tokens 100

say "Done. What the run left is in runs/quickstart: metrics.jsonl, logs, TensorBoard files, checkpoints."
