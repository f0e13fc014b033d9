"""`--full-size`: a few layers of the user's own shapes on each mesh, where the memory of this machine allows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafour.architecture.model import Architecture
from megafour.config.errors import ConfigError
from megafour.config.schema import Config
from megafour.cost.memory import sharing, state_bytes
from megafour.sizes import PRODUCTION
from megafour.verify.matrix import Degrees
from megafour.verify.shrink import Case, accumulation, place, trained_for


@dataclass(frozen=True)
class Need:
    """Bytes that a row takes at its peak: the reference and then the ranks, which run one after the other."""

    reference: int
    ranks: int
    """Of all ranks together."""

    @property
    def most(self) -> int:
        """What must be there."""
        return max(self.reference, self.ranks)


@dataclass(frozen=True)
class Skipped:
    """A mesh that is not walked, and why."""

    mesh: str
    why: str


def full_cases(config: Config, meshes: Sequence[Degrees], layers: int, steps: int, precision: str, device: str,
               available: int) -> tuple[list[Case], list[Skipped]]:
    """The user's hidden size, heads, vocabulary and sequence with `layers` layers, one micro-batch of one sample.

    Returns (what fits into `available` bytes, the meshes that do not, or that do not divide the shapes).

    Raises:
        ConfigError: the vocabulary is not known.
    """
    if not isinstance(config.model.vocab_size, int):
        raise ConfigError(f"--full-size {layers}: model.vocab_size is {config.model.vocab_size}, which only the data "
                          "tells; set model.vocab_size to a number")
    whole = config.replace({
        "model.preset": None, "model.num_layers": layers, "train.micro_batch_size": 1,
        "data": {"seq_length": config.data.seq_length, "document_mask": config.data.document_mask},
        **trained_for(config, steps, precision, device)})
    cases, skipped = [], []
    for mesh in meshes:
        try:
            case = Case(mesh, _placed(whole, config, mesh), sizes=PRODUCTION, vocab_size=config.model.vocab_size,
                        measures_rounding=False)
        except ConfigError as error:
            skipped.append(Skipped(mesh.words, str(error)))
            continue
        need = predicted(case, steps, precision)
        if need.most > available:
            skipped.append(Skipped(mesh.words, (
                f"mesh {mesh.words}: the reference needs {_gb(need.reference)} and the {mesh.world} ranks "
                f"{_gb(need.ranks)} of memory in {precision}, and {_gb(available)} are available; ask for fewer "
                "layers, a shorter data.seq_length" + (" or --dtype fp32" if precision == "fp64" else ""))))
        else:
            cases.append(case)
    return cases, skipped


def _placed(whole: Config, config: Config, mesh: Degrees) -> Config:
    """With one micro-batch, or the user's number where the schedule requires it."""
    try:
        return place(whole, config, mesh, 1, "full")
    except ConfigError:
        if mesh.pp == 1:
            raise
        return place(whole, config, mesh, accumulation(config), "full")


def predicted(case: Case, steps: int, precision: str) -> Need:
    """The peak memory of a row: states by the formulas of `cost`, activations by what each layer saves."""
    config, mesh, element = case.config, case.degrees, 8 if precision == "fp64" else 4
    model, seq, batch = config.model, config.data.seq_length, config.train.global_batch_size
    elements = Architecture(model, case.vocab_size).count
    moments = 2 if config.optimizer.name == "adamw" else 0
    # Weights, gradients, moments and two temporaries; beside them what is kept to compare with.
    kept = elements * element * (4 + moments + steps + 1 + moments)
    heads = 4 * model.num_attention_heads * seq * seq    # scores, masked, softmax, and their gradient
    width = 10 * model.hidden_size + 4 * model.num_attention_heads * model.head_size + 4 * model.ffn_size
    activations = batch * (model.num_layers * (heads + seq * width) + 3 * seq * case.vocab_size) * element
    zero_stage, shares = sharing(config.parallel)
    per_rank = state_bytes(-(-elements // (mesh.tp * mesh.pp)), zero_stage=zero_stage, shares=shares, element=element,
                           moments=moments).total
    here = batch // mesh.dp * (seq // mesh.cp) * model.num_layers * width // mesh.pp // mesh.tp * 2
    head = 3 * max(PRODUCTION.head_logits, PRODUCTION.head_tokens * case.vocab_size // mesh.tp)
    process = 400 << 20    # an interpreter with torch, and its buffers
    stored = elements * element * (steps + 1 + moments)    # the reference's file, mapped once by all ranks
    return Need(kept + activations + process, mesh.world * (per_rank + (here + head) * element + process) + stored)


def available_memory(device: str) -> int:
    """Bytes that a verification may take: of the machine or of its control group, or of all GPUs together."""
    if device == "cuda":
        import torch

        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    try:
        free = _table(Path("/proc/meminfo"))["MemAvailable:"] << 10
    except (OSError, KeyError):      # not Linux: all of the machine's
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        # Cached pages of files count as used, and are given back when memory is asked for.
        return min(free, limit - used + _table(group / "memory.stat").get("inactive_file", 0))
    except (OSError, ValueError):    # no control group, or one without a limit
        return free


def _table(path: Path) -> dict[str, int]:
    """A file of lines `name number …`."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
