"""A user's config at toy size: the same architecture and options, small enough to run on every mesh in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megafour.config.errors import ConfigError
from megafour.config.rules import resolve, smallest_world
from megafour.config.rules_pipeline import is_own_schedule, stages_a_rank
from megafour.config.schema import Config
from megafour.parallel.pipeline.select import check_pipeline, pipeline_of
from megafour.sizes import TOY, Sizes
from megafour.verify.matrix import Degrees, Row, parse_mesh

VOCAB = 67
"""Prime, so that every tp > 1 pads it."""

HIDDEN = 48
"""About the width of the toy's residual stream."""

MIN_SEQ = 24
"""Shortest sequence; longer ones only where a mesh asks for it."""

MAX_ACCUMULATION = 4

RATES = {"adamw": 0.1, "sgd": 1.0}
"""The highest learning rates of a comparison: at 1,000 the toy's weights overflow within the steps compared, and each
rounding with them."""

RATE_16_BIT = 1e-4
"""The highest learning rate of a 16-bit comparison. AdamW's first steps follow the sign of a gradient, which rounding
to 16 bits turns for many small ones: at the user's rate two sound meshes would part ways within the steps compared."""


@dataclass(frozen=True)
class Case:
    """One line of a verification: a mesh and the resolved toy config that it runs."""

    degrees: Degrees
    config: Config
    valid: str = "mixed"
    options: tuple[tuple[str, str], ...] = ()
    thorough: bool = False
    """Whether the mesh also skips a step, evaluates, and saves what is then resumed and continues a prompt."""
    resumed: tuple[Degrees, Config] | None = None
    """Another mesh, and the same config on it: there the run goes on from what this mesh saved."""
    sizes: Sizes = TOY
    vocab_size: int = VOCAB
    measures_rounding: bool = True
    """Whether the reference measures what rounding does to each gradient, by another pass in fp32."""


def user_cases(config: Config, meshes: Sequence[Degrees], steps: int, precision: str = "fp64",
               device: str = "cpu", *, thorough: bool = False) -> list[Case]:
    """The user's own options on every mesh.

    Raises:
        ConfigError: the config breaks a rule by itself, or on the toy of a mesh.
    """
    resolve(config, smallest_world(config), data=False)
    toy = shrink(config, meshes, steps, precision, device)
    cases = [Case(mesh, place(toy, config, mesh, accumulation(config))) for mesh in meshes]
    if not thorough:
        return cases
    others = [[*meshes[i + 1:], *meshes[:i], Degrees()] for i in range(len(meshes))]
    return [replace(case, thorough=True, resumed=resumed_on(toy, config, case, others[i]))
            for i, case in enumerate(cases)]


def other_cases(config: Config, steps: int, precision: str = "fp64", device: str = "cpu") -> list[Case]:
    """The user's options with masks and dropout beside them, whose paths a config without either never takes."""
    window = max(2, 5 * config.data.seq_length // MIN_SEQ)
    rows: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("dp2-cp2", {"documents": "on", "window": "pattern"},
         {"data.document_mask": True, "model.attention_window": [None, window]}),
        ("pp2-tp2", {"dropout": "on"},
         {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1, "kernels.attention": "auto"})]
    return [replace(case, options=tuple(options.items())) for mesh, options, values in rows
            for case in user_cases(config.replace(values), [parse_mesh(mesh)], steps, precision, device, thorough=True)]


def resumed_on(toy: Config, config: Config, case: Case, others: Sequence[Degrees]) -> tuple[Degrees, Config] | None:
    """The first of `others`, of no more ranks, on which the toy runs with the case's global batch."""
    batch, size = case.config.train.global_batch_size, case.config.train.micro_batch_size
    for other in others:
        if other == case.degrees or other.world > case.degrees.world or batch % (other.dp * size):
            continue
        try:
            return other, place(toy, config, other, batch // (other.dp * size))
        except ConfigError:    # a rule of that mesh, or a schedule that takes no such number of micro-batches
            continue
    return None


def accumulation(config: Config) -> int:
    """Micro-batches a step of the user's own mesh, at most MAX_ACCUMULATION; all under a schedule of the user's own,
    which may be for no other number."""
    dp = 1 if config.parallel.dp == "auto" else int(config.parallel.dp)
    count = max(1, config.train.global_batch_size // (dp * config.train.micro_batch_size))
    return count if is_own_schedule(config.parallel.pipeline.schedule) else min(count, MAX_ACCUMULATION)


def shrink(config: Config, meshes: Sequence[Degrees], steps: int, precision: str = "fp64",
           device: str = "cpu") -> Config:
    """The toy of a config, divisible on every mesh of `meshes`; the mesh itself is set by `place`."""
    model = config.model
    tps = [mesh.tp for mesh in meshes]
    seq = toy_seq_length(meshes)
    kv = toy_kv_heads(config, meshes)
    heads = kv * (model.num_attention_heads // model.kv_heads)
    # GPU kernels want widths in multiples of 8.
    head_dim = 8 if device == "cuda" else min(8, max(4, HIDDEN // heads // 2 * 2))
    hidden = max(8, round(heads * head_dim * model.hidden_size / (model.num_attention_heads * model.head_size)))
    ffn_unit = math.lcm(*tps)
    return config.replace({
        "model.preset": None, "model.num_attention_heads": heads, "model.num_key_value_heads": kv,
        "model.head_dim": head_dim, "model.hidden_size": hidden, "model.vocab_size": VOCAB,
        "model.ffn_hidden_size": max(1, round(hidden * model.ffn_size / model.hidden_size / ffn_unit)) * ffn_unit,
        "model.num_layers": toy_layers(config, max(stages_on(config, mesh) for mesh in meshes)),
        # Attention over small random weights is all but uniform: keep the outputs' scale of the full width.
        "model.init_std": min(0.3, model.init_std * max(1.0, math.sqrt(model.hidden_size / hidden))),
        "model.max_position_embeddings": _positions(config, seq),
        "model.rope_scaling": _rope_scaling(config, seq),
        "model.attention_window": _window(config, seq),
        "data": {"seq_length": seq, "document_mask": config.data.document_mask},
        "train.micro_batch_size": min(config.train.micro_batch_size, 2),
        **trained_for(config, steps, precision, device),
    })


def trained_for(config: Config, steps: int, precision: str, device: str) -> dict[str, Any]:
    """How a verification trains, whatever the size of the model."""
    rate = min(config.optimizer.lr, RATE_16_BIT if precision == "bf16" else RATES[config.optimizer.name])
    return {
        "train.precision": precision, "train.steps": 2 * steps, "train.tokens": None,
        "optimizer.eps": max(config.optimizer.eps, 1e-8),
        "optimizer.lr": rate, "lr_schedule": _lr_schedule(config, steps, rate),
        "run.device": device, "run.name": "verify", "run.dir": "runs/{name}",
        "kernels": config.kernels.model_dump() if device == "cuda" else {},
        "checkpoint": {}, "eval": {}, "logging": {}}


def place(toy: Config, config: Config, mesh: Degrees, micro_batches: int, size: str = "toy") -> Config:
    """The toy on one mesh, resolved; `config` says how the layers are cut, `size` what a message calls the toy."""
    placed = toy.replace({
        "parallel.dp": mesh.dp, "parallel.pp": mesh.pp, "parallel.tp": mesh.tp, "parallel.cp": mesh.cp,
        "parallel.pipeline.partition": _partition(config, toy.model.num_layers, stages_on(config, mesh)),
        "parallel.zero_size": toy.parallel.zero_size and math.gcd(toy.parallel.zero_size, mesh.dp * mesh.cp),
        **_context(toy, mesh),
        "train.global_batch_size": mesh.dp * toy.train.micro_batch_size * micro_batches})
    try:
        resolved = resolve(placed, mesh.world, data=False)
        check_pipeline(resolved)
        return resolved
    except ConfigError as error:
        raise ConfigError(f"mesh {mesh.words}, at {size} size: {error}") from None


def toy_seq_length(meshes: Sequence[Degrees]) -> int:
    """The shortest length from MIN_SEQ that every layout and every sequence-parallel shard divides."""
    unit = math.lcm(*(2 * mesh.cp * mesh.tp for mesh in meshes))
    return -(-MIN_SEQ // unit) * unit


def _context(toy: Config, mesh: Degrees) -> dict[str, Any]:
    """How this mesh splits a sequence: the user's numbers of ranks, as far as they divide its cp."""
    context = toy.parallel.context
    ulysses = context.ulysses
    if ulysses != "auto":
        ulysses = mesh.cp if context.method == "ulysses" else math.gcd(int(ulysses), mesh.cp)
    inner = None if context.inner_ring is None else math.gcd(context.inner_ring, mesh.cp)
    return {"parallel.context.ulysses": ulysses, "parallel.context.inner_ring": inner}


def _window(config: Config, seq: int) -> Any:
    """The same windows, in proportion to the sequence."""
    def scaled(window: int | None) -> int | None:
        return window if window in (None, 1) else max(2, round(window * seq / config.data.seq_length))

    windows = config.model.attention_window
    return [scaled(window) for window in windows] if isinstance(windows, list) else scaled(windows)


def toy_kv_heads(config: Config, meshes: Sequence[Degrees]) -> int:
    """The fewest K/V heads, two where there are, that keep the ratio to query heads, and whether tp repeats them.

    On every mesh asked for.
    """
    model = config.model
    tps = [mesh.tp for mesh in meshes]
    # Query heads are split by ulysses as well; `auto` of usp follows the K/V heads.
    shares = [mesh.tp * int(_ulysses(config, mesh)) for mesh in meshes]
    ratio = model.num_attention_heads // model.kv_heads
    repeated = model.kv_heads < config.parallel.tp
    least = 1 if repeated else min(model.kv_heads, max(2, *tps))
    for kv in range(least, math.lcm(*shares) * least + 1):
        if all(kv % tp == 0 or tp % kv == 0 for tp in tps) and all(ratio * kv % share == 0 for share in shares):
            return kv
    return math.lcm(*shares) * least


def _ulysses(config: Config, mesh: Degrees) -> int:
    """Ranks of `mesh` that split heads, as far as that does not follow the heads themselves."""
    asked = _context(config, mesh)["parallel.context.ulysses"]
    if config.parallel.context.method not in ("ulysses", "usp"):
        return 1
    return (mesh.cp if config.parallel.context.method == "ulysses" else 1) if asked == "auto" else asked


def stages_on(config: Config, mesh: Degrees) -> int:
    """Stages of a mesh under the config's schedule; a table of the user's own says so itself, for every rank apart."""
    held = stages_a_rank(config)
    if held is not None:
        return mesh.pp * held
    try:
        return pipeline_of(config.replace({"parallel.pp": mesh.pp}), accumulation(config)).placement.stages
    except ConfigError as error:
        raise ConfigError(f"mesh {mesh.words}: {error}") from None


def toy_layers(config: Config, deepest: int) -> int:
    """Four layers or one a stage; one more where the user's stages are uneven."""
    counts = config.parallel.pipeline.partition
    if counts == "auto":
        uneven = config.model.num_layers % stages_on(config, Degrees(pp=config.parallel.pp)) > 0
    else:
        uneven = len(set(counts)) > 1
    return max(deepest, min(config.model.num_layers, 4)) + uneven


def _partition(config: Config, layers: int, stages: int) -> Any:
    """Explicit counts stay explicit: the surplus layers on the stages that are largest in the user's."""
    counts = config.parallel.pipeline.partition
    if counts == "auto" or stages == 1:
        return "auto"
    user = [int(n) for n in counts]
    order = sorted(range(stages), key=lambda stage: -user[stage * len(user) // stages])
    base, surplus = divmod(layers, stages)
    return [base + (stage in order[:surplus]) for stage in range(stages)]


def _positions(config: Config, seq: int) -> int | None:
    """Trained positions keep a few that no sequence reaches, where the user's have some."""
    limit = config.model.max_position_embeddings
    if config.model.position != "learned":
        return None
    return seq + 3 if limit is not None and limit > config.data.seq_length else seq


def _rope_scaling(config: Config, seq: int) -> dict[str, Any] | None:
    """The same scaling, with an original length that the toy's sequence exceeds."""
    scaling = config.model.rope_scaling
    if scaling is None:
        return None
    values = scaling.model_dump()
    if values["original_max_position_embeddings"] is not None:
        values["original_max_position_embeddings"] = seq // 2
    return values


def _lr_schedule(config: Config, steps: int, peak: float) -> dict[str, Any]:
    """The same shape over twice the steps that run, so that the rate is above zero in all of them."""
    schedule = config.lr_schedule
    return {"name": schedule.name, "min_lr": min(schedule.min_lr, peak), "warmup_steps": min(schedule.warmup_steps, 1)}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope",
              "model.qkv_bias": False, "model.linear_bias": False},
    "gpt2": {"model.norm": "layernorm", "model.activation": "gelu_tanh", "model.position": "learned",
             "model.qkv_bias": True, "model.linear_bias": True, "model.rope_scaling": None},
}
"""What the two families of a covering walk set."""


def option_case(config: Config, row: Row, steps: int, precision: str = "fp64", device: str = "cpu", *,
                thorough: bool = False) -> Case:
    """The toy of one row of a covering array: the user's config with the row's options over it."""
    mesh = parse_mesh(row["mesh"])
    context = _row_context(row, mesh)
    heads, kv = _heads(row["kv_heads"], mesh.tp, mesh.cp if context["method"] in ("ulysses", "usp") else 1)
    schedule, _, chunks = row.get("schedule", "1f1b").partition(":")
    stage, _, size = row.get("zero_stage", "1").partition(":")
    pipeline = {"schedule": schedule, "virtual_stages": int(chunks) if chunks else None}
    stages = stages_on(config.replace({"parallel.pipeline": pipeline}), mesh)
    layers = max(2, stages) * (1 if stages >= 4 else 2) + (row.get("layers", "even") != "even")
    dropout = 0.2 if row["dropout"] == "on" else 0.0
    order = {"auto": "auto", "pp-inner": "pp-inner", "reversed": "pp-dp-ring-ulysses-tp"}[row.get("order", "auto")]
    asked = config.replace({
        **FAMILIES[row["family"]],
        "model.num_attention_heads": heads, "model.num_key_value_heads": kv, "model.head_dim": None,
        "model.hidden_size": 8 * heads, "model.ffn_hidden_size": 24 * mesh.tp, "model.num_layers": layers,
        "model.tie_embeddings": row["tied"] == "true", "model.qk_norm": row["qk_norm"] == "true",
        "model.hidden_dropout": dropout, "model.attention_dropout": dropout, "model.init_std": 0.15,
        "model.max_position_embeddings": None,
        "parallel.sequence_parallel": row.get("sequence_parallel", "true") == "true",
        "parallel.zero_stage": int(stage), "parallel.zero_size": int(size) if size else None, "parallel.order": order,
        "parallel.tp": mesh.tp, "parallel.pp": mesh.pp, "parallel.cp": mesh.cp, "parallel.dp": mesh.dp,
        "parallel.context": context, "data.document_mask": row["documents"] == "on",
        "model.attention_window": {"none": None, "short": 3, "pattern": [None, 9]}[row["window"]],
        "parallel.pipeline": pipeline,
        "train.micro_batch_size": int(row["micro_batch_size"]), "train.recompute": row["recompute"],
        "train.grad_clip": 0.1 if row["clip"] == "tight" else 0.0, "optimizer.name": row["optimizer"]})
    toy = shrink(asked, [mesh], steps, precision, device).replace({
        "model.num_layers": layers, "model.num_attention_heads": heads, "model.num_key_value_heads": kv})
    if row.get("layers") == "explicit":    # the surplus layer where the automatic cut would not put it
        asked = asked.replace({"parallel.pipeline.partition": [*[1] * (stages - 1), layers - stages + 1]})
    options = tuple((name, value) for name, value in row.items() if name != "mesh")
    case = Case(mesh, place(toy, asked, mesh, int(row["micro_batches"])), row["valid"], options)
    if not thorough:
        return case
    rest = mesh.dp * mesh.tp * mesh.cp
    others = [Degrees(tp=rest), Degrees(cp=rest), Degrees(dp=mesh.dp, cp=mesh.tp * mesh.cp), Degrees(cp=2), Degrees()]
    no_stages = {"parallel.pipeline": {}, "parallel.tp": 1, "parallel.cp": 1, "parallel.pp": 1}
    toy = toy.replace({"parallel.pipeline": {}})
    return replace(case, thorough=True, resumed=resumed_on(toy, asked.replace(no_stages), case, others))


def _row_context(row: Row, mesh: Degrees) -> dict[str, Any]:
    """The `parallel.context` section of a row; two ranks inside where there is an inner and an outer part."""
    method = row.get("method", "ring")
    return {"method": method, "layout": row.get("layout", "zigzag"), "ulysses": 2 if method == "usp" else "auto",
            "inner_ring": 2 if method == "double_ring" else None}


def _heads(kind: str, tp: int, ulysses: int = 1) -> tuple[int, int]:
    """(query heads, K/V heads) of a kind of grouping on `tp` ranks, each with heads for `ulysses` ranks."""
    if kind == "all":
        return math.lcm(4, tp * ulysses), math.lcm(4, tp * ulysses)
    if kind == "grouped":
        return math.lcm(2 * max(tp, 2), tp * ulysses), max(tp, 2)
    if kind == "one":
        return math.lcm(2, tp * ulysses), 1
    repeated = max(kv for kv in range(1, tp) if tp % kv == 0)
    return math.lcm(2 * tp, tp * ulysses), repeated
