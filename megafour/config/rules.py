"""Every rule between keys, each with its equation in numbers, and `resolve`, which fills in what `auto` stands for."""

import math
from collections.abc import Callable, Iterator

from megafour.config.errors import ConfigError
from megafour.config.parallel_schema import AXES, ORDERS
from megafour.config.presets import PRESETS
from megafour.config.rules_context import context_rules, multiples, ulysses_ranks
from megafour.config.rules_model import model_rules
from megafour.config.rules_pipeline import pipeline_rules
from megafour.config.rules_training import training_rules
from megafour.config.rules_version import version_rules
from megafour.config.schema import Config

Rule = Callable[[Config], Iterator[str]]
"""Yields one message for each way in which a configuration breaks it."""


def resolve(config: Config, world: int, data: bool = True) -> Config:
    """Check every rule and fill in every value that follows from others.

    Args:
        config: as loaded.
        world: number of ranks.
        data: whether datasets are needed; a plan or a verification has its own.
    Returns:
        the configuration with numbers for parallel.dp, train.steps, model.max_position_embeddings,
        lr_schedule.decay_steps and so on; model.vocab_size stays `auto` until the tokenizer is known. Resolving it
        again for the same world changes nothing.
    Raises:
        ConfigError: for the first broken rule.
    """
    _check(config, version_rules)
    resolved = _filled(config, _data_parallel(config, world))
    _check(resolved, mesh_rules, model_rules, context_rules, training_rules)
    if data and not resolved.data.train:
        _refuse(config, "data.train is empty: give it at least one dataset, such as data.train=[{path: data/corpus}]")
    return resolved


def smallest_world(config: Config) -> int:
    """The fewest ranks that the mesh of a configuration as loaded takes: pp · tp · cp · dp.

    A dp of `auto` counts as 1, or as what makes dp · cp one copy of `parallel.zero_size` ranks.
    """
    p = config.parallel
    least = p.zero_size // math.gcd(p.zero_size, p.cp) if p.zero_size else 1
    return p.pp * p.tp * p.cp * (least if p.dp == "auto" else int(p.dp))


def _check(config: Config, *groups: Rule) -> None:
    for rules in groups:
        for message in rules(config):
            _refuse(config, message)


def _refuse(config: Config, message: str) -> None:
    raise ConfigError(f"{config.source}: {message}" if config.source else message)


def _data_parallel(config: Config, world: int) -> int:
    """dp from world = dp · pp · tp · cp."""
    p = config.parallel
    model_ranks = p.pp * p.tp * p.cp
    factors = f"parallel.pp {p.pp} · parallel.tp {p.tp} · parallel.cp {p.cp}"
    if p.dp == "auto":
        if world % model_ranks:
            _refuse(config, f"world = dp · pp · tp · cp: {world} ranks are not a multiple of {factors} = "
                            f"{model_ranks}; change the number of ranks, parallel.pp, parallel.tp or parallel.cp")
        return world // model_ranks
    if world != p.dp * model_ranks:
        fix = f"launch {p.dp * model_ranks} ranks or set parallel.dp=auto"
        _refuse(config, f"world = dp · pp · tp · cp: {world} ranks ≠ parallel.dp {p.dp} · {factors} = "
                        f"{p.dp * model_ranks}; {fix}")
    return int(p.dp)


def _filled(config: Config, dp: int) -> Config:
    """The configuration with derived values written out."""
    model, train, schedule = config.model, config.train, config.lr_schedule
    steps = train.steps
    if steps is None and train.tokens is not None:
        steps = -(-train.tokens // (train.global_batch_size * config.data.seq_length))
    elif train.tokens is not None:
        _refuse(config, f"train.steps = {steps} and train.tokens = {train.tokens} both give the length of training; "
                        "set one of them to null")
    if steps is None:
        _refuse(config, "the length of training is missing: set train.steps or train.tokens")
        raise AssertionError
    decay = schedule.decay_steps
    if decay is None and schedule.name != "constant":
        decay = max(1, steps // 10) if schedule.name == "wsd" else steps
    return config.replace({
        "run.dir": config.run_dir,
        "checkpoint.dir": config.checkpoint_dir if config.checkpoint.dir else None,
        # The keys below are written out in full, so that the resolved file does not need the folder any more.
        "model.preset": model.preset if model.preset in PRESETS else None,
        "model.num_key_value_heads": model.kv_heads,
        "model.head_dim": model.head_dim or _head_dim(config),
        "model.ffn_hidden_size": model.ffn_size,
        "model.max_position_embeddings": model.max_position_embeddings or config.data.seq_length,
        "parallel.dp": dp,
        "parallel.context.ulysses": ulysses_ranks(config),
        "train.steps": steps,
        "train.tokens": None,
        "lr_schedule.decay_steps": decay,
    })


def _head_dim(config: Config) -> int:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if hidden % heads:
        _refuse(config, f"head_dim = hidden_size / num_attention_heads: model.hidden_size {hidden} is not a multiple "
                        f"of model.num_attention_heads {heads}; change one of them or set model.head_dim")
    return hidden // heads


def mesh_rules(config: Config) -> Iterator[str]:
    """Batch and layers against the mesh."""
    yield from _batch(config)
    yield from pipeline_rules(config)
    yield from _zero(config)
    yield from _order(config)


def _batch(config: Config) -> Iterator[str]:
    batch, micro, dp = config.train.global_batch_size, config.train.micro_batch_size, config.parallel.dp
    assert isinstance(dp, int)
    if batch % (dp * micro):
        yield (f"global batch = dp · micro batch · accumulation: train.global_batch_size {batch} is not a multiple of "
               f"parallel.dp {dp} · train.micro_batch_size {micro} = {dp * micro}; set train.global_batch_size to "
               f"{multiples(batch, dp * micro)}, or change train.micro_batch_size")


def _zero(config: Config) -> Iterator[str]:
    p = config.parallel
    if p.zero_size is None:
        return
    ranks = int(p.dp) * p.cp
    if p.zero_stage == 0:
        yield (f"parallel.zero_size = {p.zero_size} contradicts parallel.zero_stage = 0, which shares nothing; set it "
               "to null, or parallel.zero_stage to 1, 2 or 3")
    elif ranks % p.zero_size:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield (f"dp · cp = zero_size · replicas: parallel.dp {p.dp} · parallel.cp {p.cp} = {ranks} is not a multiple "
               f"of parallel.zero_size {p.zero_size}; set parallel.zero_size to {fits} or null")


def _order(config: Config) -> Iterator[str]:
    order = config.parallel.order
    if order in ORDERS or sorted(order.split("-")) == sorted(AXES):
        return
    yield (f"parallel.order = {order} is not an order of ranks: use {', '.join(ORDERS)}, or {', '.join(AXES)} "
           f"each once, fastest first, joined by -, such as {'-'.join(AXES)}")
