"""Training steps of a tiny model at great length, in fresh processes: scripts/bench/context.py --memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 256
MODEL = "a Llama of 1 layer, hidden 64, 1 head of 32, ffn 176, vocabulary 256"


def peak(cp: int, seq: int, threads: int) -> int:
    """Bytes of the largest rank's peak resident memory over one step of one sample of `seq` tokens."""
    from megafour.data.indexed import IndexedWriter

    with tempfile.TemporaryDirectory(prefix="megafour-bench-") as folder, socket.socket() as free:
        work = Path(folder)
        with IndexedWriter(work / "random", VOCAB) as writer:
            writer.add(np.random.default_rng(0).integers(0, VOCAB, 2 * seq + 2))
        config = {
            "run": {"name": "memory", "dir": str(work / "run"), "device": "cpu"},
            "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "head_dim": 32,
                      "ffn_hidden_size": 176, "vocab_size": VOCAB, "max_position_embeddings": seq},
            "parallel": {"cp": cp},
            "data": {"train": [{"path": str(work / "random")}], "seq_length": seq},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "precision": "fp32"},
            "lr_schedule": {"name": "constant"},
            "checkpoint": {"every": 0, "resume": "never"},
            "logging": {"tensorboard": False},
        }
        (work / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = []
        for rank in range(cp):
            env = {**os.environ, "OMP_NUM_THREADS": str(max(1, threads // cp)), "PYTHONPATH": str(ROOT),
                   "RANK": str(rank), "WORLD_SIZE": str(cp), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(cp),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            with (work / f"log-{rank}").open("w", encoding="utf-8") as log:
                ranks.append(subprocess.Popen([sys.executable, "train.py", "--config", str(work / "config.yaml")],
                                              cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(f"error: cp {cp}, {seq} tokens: ended with {codes}\n"
                     f"{(work / 'log-0').read_text('utf-8')[-3000:]}")
        metrics = (work / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
        return json.loads(metrics[0])["peak_memory_bytes"]
