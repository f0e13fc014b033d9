"""Rules on data, length, learning rate, precision and kernels."""

import math
from collections.abc import Collection, Iterator

from megafour.config.schema import Config


def training_rules(config: Config) -> Iterator[str]:
    """One message for each broken rule of a configuration whose train.steps is a number."""
    yield from _learning_rate(config)
    yield from _data(config)
    yield from _kernels(config)
    yield from _starting_point(config)
    yield from _profile(config)


def _learning_rate(config: Config) -> Iterator[str]:
    schedule, steps, lr = config.lr_schedule, config.train.steps or 0, config.optimizer.lr
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if warmup >= steps:
        yield (f"warm-up < steps: lr_schedule.warmup_steps {warmup} ≥ train.steps {steps}; lower "
               "lr_schedule.warmup_steps or raise train.steps")
    if schedule.min_lr > lr:
        yield (f"min_lr ≤ lr: lr_schedule.min_lr {schedule.min_lr:g} > optimizer.lr {lr:g}; lower lr_schedule.min_lr")
    if schedule.name == "constant":
        for key, value in (("min_lr", schedule.min_lr), ("decay_steps", decay)):
            if value:
                yield (f"lr_schedule.{key} = {value:g} has no effect on lr_schedule.name = constant, which never "
                       f"decays; remove it, or set lr_schedule.name to cosine, linear or wsd")
        return
    if decay is None:
        return
    if schedule.name == "wsd" and warmup + decay > steps:
        yield (f"warm-up + decay ≤ steps: lr_schedule.warmup_steps {warmup} + lr_schedule.decay_steps {decay} = "
               f"{warmup + decay} > train.steps {steps}; lower lr_schedule.decay_steps")
    if schedule.name in ("cosine", "linear") and warmup >= decay:
        yield (f"warm-up < decay: lr_schedule.warmup_steps {warmup} ≥ lr_schedule.decay_steps {decay}; raise "
               "lr_schedule.decay_steps or lower lr_schedule.warmup_steps")


def _data(config: Config) -> Iterator[str]:
    data = config.data
    blends = {"data.train": data.train} | {f"data.valid.{name}": blend for name, blend in data.valid.items()}
    for key, sources in blends.items():
        if sources and sum(source.weight for source in sources) <= 0:
            yield f"{key}: the weights add up to 0; give at least one dataset a weight above 0"
        weights = {source.weight for source in sources}
        if key != "data.train" and len(weights) > 1:
            yield (f"{key}: a validation set is read once, whole, so its weights must be equal, and they are "
                   f"{', '.join(f'{source.weight:g}' for source in sources)}; leave them out")
        if not sources and key != "data.train":
            yield f"{key} is empty: give it a dataset, or remove it"
    if data.split is not None:
        yield from _split(data.split, data.valid)
    validated = bool(data.valid) or (data.split is not None and _shares(data.split)[1:2] > [0])
    if config.eval.every and not validated:
        yield (f"eval.every = {config.eval.every} and there is nothing to evaluate: set data.valid or data.split, or "
               "eval.every=0")
    tokenizer = data.tokenizer
    if tokenizer is not None and tokenizer.kind != "bytes" and tokenizer.path is None:
        yield f"data.tokenizer.kind = {tokenizer.kind} needs data.tokenizer.path"
    if tokenizer is not None and tokenizer.kind == "bytes" and tokenizer.path is not None:
        yield f"data.tokenizer.path = {tokenizer.path} has no effect on kind = bytes; remove it"


def _split(text: str, valid: Collection[str]) -> Iterator[str]:
    shares = _shares(text)
    if not 1 <= len(shares) <= 3 or not all(math.isfinite(share) for share in shares) or min(shares) < 0 or (
            sum(shares) <= 0):
        yield (f"data.split = {text} is not valid: it must be the shares of train, validation and test, such as 98,1,1")
    elif shares[0] == 0:
        yield f"data.split = {text}: the share of train must be above 0"
    if len(shares) > 1 and shares[1] > 0 and "valid" in valid:
        yield (f"data.split = {text} makes a validation set named valid, and data.valid has one too; rename "
               "data.valid.valid")


def _shares(text: str) -> list[float]:
    """`98,1,1` as numbers; empty where it is not that."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _kernels(config: Config) -> Iterator[str]:
    if config.kernels.attention != "flash":
        return
    if config.train.precision in ("fp32", "fp64"):
        yield (f"kernels.attention = flash runs in bf16 and fp16, and train.precision is {config.train.precision}; set "
               "kernels.attention=auto or train.precision=bf16")
    if config.parallel.context.fp32_blocks:
        yield ("kernels.attention = flash runs in bf16 and fp16, and parallel.context.fp32_blocks computes the blocks "
               "in fp32; set kernels.attention=auto or parallel.context.fp32_blocks=false")
    if config.run.device == "cpu":
        yield "kernels.attention = flash runs on GPUs, and run.device is cpu; set kernels.attention=auto"
    if config.model.attention_dropout > 0:
        yield (f"kernels.attention = flash has no addressed dropout, and model.attention_dropout is "
               f"{config.model.attention_dropout:g}; set kernels.attention=auto or model.attention_dropout=0")


def _starting_point(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.init_optimizer and checkpoint.init_from is None:
        yield "checkpoint.init_optimizer = true needs checkpoint.init_from"


def _profile(config: Config) -> Iterator[str]:
    step, steps = config.logging.profile, config.train.steps or 0
    if step is not None and step > steps:
        yield (f"logging.profile = {step} is never reached: train.steps is {steps}; set it to a step from 1 to "
               f"{steps}, or to null")
