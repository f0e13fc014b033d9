"""The whole configuration as typed classes: one class a section, one docstring a key."""

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from megafour.config.base import Count, Index, Location, NonNegative, Positive, Section, Text
from megafour.config.model_schema import ModelConfig
from megafour.config.parallel_schema import ParallelConfig


class RunConfig(Section):
    """Name, place and seed of the run."""

    name: Text = "run"
    """Name of the run, shown in logs and trackers."""

    dir: Location = "runs/{name}"
    """Folder of the run; `{name}` stands for run.name. Must be shared by all nodes."""

    seed: Index = 1234
    """Decides initial weights, dropout and the order of samples, on every mesh alike."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. `auto`: GPUs only where there is one for each local rank."""

    timeout_seconds: Positive = 600.0
    """Seconds that a rank may wait for the others, in a step, an evaluation or a save (so: more than the slowest rank
    takes to save), before the run ends with a report of where each rank is. Start and first step: 30 minutes."""


class DataSource(Section):
    """One tokenized dataset of a blend."""

    path: Location
    """Prefix of the dataset: `PATH.bin` and `PATH.idx`, as `megafour prepare` writes them."""

    weight: NonNegative = 1.0
    """Share of samples in the blend, relative to the other datasets' weights."""


class TokenizerConfig(Section):
    """The tokenizer that made the datasets; needed to generate text and kept in every checkpoint."""

    kind: Literal["sentencepiece", "huggingface", "tiktoken", "bytes"] = "sentencepiece"
    """`sentencepiece` model, Hugging Face `tokenizer.json`, `tiktoken` BPE file, or plain `bytes`."""

    path: Location | None = None
    """The tokenizer's file. Null for `bytes`."""


class DataConfig(Section):
    """What is trained on and how it becomes samples."""

    train: list[DataSource] = []
    """Datasets to train on, blended by weight."""

    valid: dict[str, list[DataSource]] = {}
    """Named validation blends: `{NAME: [{path: …}]}`; each gives its own `valid_loss/NAME`."""

    split: Text | None = None
    """Shares, on any scale, by which each training dataset is split by document into train, validation and test:
    `98,1,1`. The second part becomes the validation set `valid`. Null: all of it is trained on."""

    seq_length: Count = 512
    """Tokens in a sample."""

    document_mask: bool = False
    """Packed documents do not see each other: attention and positions begin anew in each, and its last token has no
    label. False: a sample is one text."""

    skip_samples: list[Index] = []
    """Samples that are never trained on: their numbers in the run's order, as the line of a skipped step gives them."""

    tokenizer: TokenizerConfig | None = None
    """The tokenizer. Null: only what the datasets' own `.json` says about it is known."""

    workers: Index = 0
    """Threads per rank that read ahead. 0: the step itself reads. The batches are the same for any number."""


class TrainConfig(Section):
    """Length, batch and numerics of training."""

    steps: Count | None = 200
    """Optimizer steps. Null where train.tokens is given."""

    tokens: Count | None = None
    """Length in tokens instead of steps; rounded up to whole steps."""

    global_batch_size: Count = 16
    """Samples in one optimizer step, over all ranks: dp · micro_batch_size · accumulation."""

    micro_batch_size: Count = 1
    """Samples in one forward and backward on one data-parallel replica."""

    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "bf16"
    """Type of weights and activations. bf16 and fp16 keep fp32 master weights; fp16 scales the loss dynamically."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping: nothing, the attention core, or whole blocks."""

    grad_clip: NonNegative = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""

    max_skipped_steps: Count = 10
    """Steps in a row that may be skipped, for gradients that are not finite or a spike, before the run stops."""

    spike_deviations: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Skip a step whose gradient norm, before clipping, exceeds the mean of the last applied steps by more than so many
    standard deviations. Null: never."""

    spike_window: Annotated[int, Field(ge=4, le=100_000)] = 100
    """Applied steps whose norms train.spike_deviations looks back on. No step is skipped until there are so many."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_replace_default_steps(cls, values: Any) -> Any:
        """`tokens` without `steps` means that the default of `steps` does not hold."""
        if isinstance(values, dict) and values.get("tokens") is not None and "steps" not in values:
            return {**values, "steps": None}
        return values


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw`, or `sgd` (no momentum)."""

    lr: Positive = 3.0e-4
    """Peak learning rate."""

    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the first and second moment."""

    eps: Positive = 1.0e-8
    """AdamW's term beside the root of the second moment."""

    weight_decay: NonNegative = 0.1
    """Decoupled decay of every tensor of two or more dims, and of nothing else."""


class LrScheduleConfig(Section):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up. `wsd`: constant, then a linear decay at the end."""

    warmup_steps: Index = 0
    """Steps over which the rate rises linearly to optimizer.lr."""

    decay_steps: Count | None = None
    """`cosine`, `linear`: step at which min_lr is reached, warm-up included (null: train.steps). `wsd`: length of
    the final decay, which ends at train.steps (null: a tenth of it)."""

    min_lr: NonNegative = 0.0
    """Rate at the end of the decay and after it."""


class EvalConfig(Section):
    """Validation during training; it changes nothing in training."""

    every: Index = 0
    """Steps between evaluations. 0: never."""

    batches: Count = 10
    """Global batches per evaluation, of each validation set."""


class CheckpointConfig(Section):
    """What is saved, what is kept, and from what a run starts."""

    dir: Location | None = None
    """Folder of the checkpoints. Null: `checkpoints` in run.dir."""

    every: Index = 100
    """Steps between checkpoints. 0: only the last step, which is always saved."""

    keep: Count = 3
    """Newest checkpoints that are kept."""

    keep_every: Count | None = None
    """Keep the checkpoints of every step that is a multiple of this as well. Null: none."""

    asynchronous: bool = False
    """Write while training goes on, from a copy of the step in host memory (as large as the rank's share of weights and
    moments). The next save waits for the last one; one that fails ends the run."""

    resume: Index | Location = "auto"
    """`auto`: the newest whole checkpoint if there is one; `never`: refuse a folder that holds checkpoints; a step; or
    the path of a checkpoint."""

    init_from: Location | None = None
    """Checkpoint or Hugging Face folder whose weights a new run starts from, at step 0."""

    init_optimizer: bool = False
    """Take the optimizer's moments from init_from too."""


class KernelsConfig(Section):
    """Backends of the hot operations. `auto`: the fastest one that is installed and fits."""

    attention: Literal["auto", "torch", "flash", "plain"] = "auto"
    """`torch`: torch's own op; `flash`: the flash-attn package (CUDA); `plain`: blockwise in plain torch, anywhere."""

    norm: Literal["auto", "torch"] = "auto"
    """Norms and activations."""

    loss: Literal["auto", "torch"] = "auto"
    """Cross-entropy over the vocabulary."""


class LoggingConfig(Section):
    """What a run says about itself."""

    every: Count = 1
    """Steps between console lines; metrics.jsonl has every step."""

    tensorboard: bool = True
    """Write TensorBoard files, where its package is installed."""

    wandb: Text | None = None
    """Project in Weights & Biases. Null: off. It runs in a process of its own: one that fails or hangs never stops or
    holds a run, and has five seconds to finish after the run has."""

    traffic: bool = False
    """Count calls, bytes and time of each primitive on each axis; log them beside the bytes that formulas predict."""

    timeline: bool = False
    """Record when each action of the pipeline runs, in the second step: the run's log draws what the schedule predicts
    above what was measured, `logs/timeline.json` holds the numbers, and `logs/timeline.svg` the picture."""

    profile: Count | None = None
    """Step, counted from 1, whose torch profiler trace is written to the run's folder. Null: none."""

    slow_ranks: Index = 100
    """Steps over which each rank's own time (a step without the waits for other ranks, or for a core) is taken and
    compared; one that is a fifth above the median of the ranks with the same work is named in a line. 0: never."""

    parameter_norms: Index = 0
    """Steps between lines with the norm of every parameter and gradient. 0: never."""

    peak_tflops: Literal["auto"] | Positive = "auto"
    """Peak of one device in TFLOP/s, which MFU is measured against. `auto`: by the device's name."""

    @field_validator("wandb")
    @classmethod
    def _wandb_is_a_name(cls, value: str | None) -> str | None:
        """`off` is text for a text key: without this it would name a project."""
        if value is not None and value.lower() in ("off", "no", "false", "none", "on", "yes", "true"):
            raise ValueError("is a project's name; null switches it off")
        return value


class Config(Section):
    """A training run, whole. Sections that a file leaves out take their defaults."""

    run: RunConfig = RunConfig()
    """Name, place and seed."""

    model: ModelConfig = ModelConfig()
    """Shape of the decoder."""

    parallel: ParallelConfig = ParallelConfig()
    """The mesh."""

    data: DataConfig = DataConfig()
    """Datasets and samples."""

    train: TrainConfig = TrainConfig()
    """Length, batch and numerics."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate."""

    eval: EvalConfig = EvalConfig()
    """Validation."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving, keeping, starting."""

    kernels: KernelsConfig = KernelsConfig()
    """Backends."""

    logging: LoggingConfig = LoggingConfig()
    """Logs and trackers."""

    _source: str | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Equal values; the file that they came from does not count."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    @property
    def source(self) -> str | None:
        """The file that the configuration was loaded from, for messages."""
        return self._source

    @property
    def run_dir(self) -> str:
        """run.dir with `{name}` filled in."""
        return self._named(self.run.dir)

    @property
    def checkpoint_dir(self) -> str:
        """Folder of the checkpoints: checkpoint.dir, or `checkpoints` in the run's folder."""
        return self._named(self.checkpoint.dir) if self.checkpoint.dir else f"{self.run_dir}/checkpoints"

    def _named(self, folder: str) -> str:
        """A folder with `{name}` filled in; a name's own `~` is no home folder."""
        path = folder.replace("{name}", self.run.name)
        return f"./{path}" if path.startswith("~") else path

    def replace(self, values: dict[str, Any]) -> "Config":
        """A copy with other values for the given dotted keys, validated anew.

        Args:
            values: `{"parallel.tp": 2, "model.head_dim": None}`; a section's key may hold a mapping.
        Raises:
            pydantic.ValidationError: for an unknown key or a value of a wrong type.
        """
        tree = self.model_dump()
        for key, value in values.items():
            *parents, last = key.split(".")
            place = tree
            for parent in parents:
                place = place[parent]
            place[last] = value
        copy = Config.model_validate(tree)
        copy._source = self._source
        return copy
