"""A resolved configuration in words: the mesh, the batch's equation, the length, the model's parameters."""

from megafour.architecture.model import Architecture
from megafour.config.model_schema import ModelConfig
from megafour.config.schema import Config

AXIS_WORDS = {
    "dp": ("replica", "replicas"),
    "pp": ("pipeline stage", "pipeline stages"),
    "tp": ("tensor-parallel rank", "tensor-parallel ranks"),
    "cp": ("context-parallel rank", "context-parallel ranks"),
}


def mesh_name(config: Config) -> str:
    """The mesh as `dp2-pp2-tp2-cp2`; axes of size 1 are left out, a single rank is `dp1`."""
    parts = [f"{axis}{size}" for axis, size in _sizes(config).items() if size > 1]
    return "-".join(parts) or "dp1"


def _sizes(config: Config) -> dict[str, int]:
    return {axis: int(getattr(config.parallel, axis)) for axis in AXIS_WORDS}


def describe(config: Config) -> str:
    """A few lines that say what a resolved configuration trains, on what mesh and with what batch."""
    rows = [
        ("run", f"{config.run.name} in {config.run_dir}, seed {config.run.seed}, {config.train.precision}"),
        ("mesh", _mesh(config)),
        ("batch", _batch(config)),
        ("length", _length(config)),
        ("model", model_words(config.model)),
    ]
    return "\n".join(f"{name:<7}{text}" for name, text in rows)


def _mesh(config: Config) -> str:
    sizes = _sizes(config)
    world = 1
    for size in sizes.values():
        world *= size
    words = [f"{size} {AXIS_WORDS[axis][size > 1]}" for axis, size in sizes.items() if size > 1]
    equation = f": world {world} = " + " · ".join(words) if words else ""
    shared = config.parallel.zero_size
    options = [f"zero {config.parallel.zero_stage}" + (f" over {shared} ranks" if shared else "")]
    if config.parallel.tp > 1:
        options.append("sequence parallel" if config.parallel.sequence_parallel else "no sequence parallel")
    if config.parallel.cp > 1:
        options.append(f"{config.parallel.context.layout} {config.parallel.context.method}")
    if config.parallel.pp > 1:
        options.append(config.parallel.pipeline.schedule)
    return f"{mesh_name(config)}{equation or ': one rank'} ({', '.join(options)})"


def _batch(config: Config) -> str:
    train, dp = config.train, int(config.parallel.dp)
    accumulation = train.global_batch_size // (dp * train.micro_batch_size)
    return (f"{train.global_batch_size} samples = dp {dp} · micro batch {train.micro_batch_size} · accumulation "
            f"{accumulation}; {train.global_batch_size * config.data.seq_length:,} tokens a step "
            f"(sequence {config.data.seq_length:,})")


def _length(config: Config) -> str:
    steps = config.train.steps or 0
    tokens = steps * config.train.global_batch_size * config.data.seq_length
    return f"{steps:,} steps = {tokens:,} tokens; {config.lr_schedule.name} learning rate, peak {config.optimizer.lr:g}"


def model_words(model: ModelConfig) -> str:
    """Shape and number of parameters."""
    known = model.vocab_size != "auto"
    count = Architecture(model, int(model.vocab_size) if known else 0).count
    words = f"{count:,} parameters" + ("" if known else " without the vocabulary's, which the tokenizer decides")
    shape = (f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads of "
             f"{model.head_size} ({model.kv_heads} key/value), ffn {model.ffn_size}, vocabulary {model.vocab_size}")
    return f"{model.preset + ': ' if model.preset else ''}{shape}; {words}"
