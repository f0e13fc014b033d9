"""What other frameworks call our keys: read by the suggestions of error messages and by docs/migrating.md."""

from dataclasses import dataclass, field

MEGATRON, TORCHTITAN, HUGGINGFACE, NANOTRON = "Megatron-LM", "torchtitan", "Hugging Face", "nanotron"
PROJECTS = (MEGATRON, TORCHTITAN, HUGGINGFACE, NANOTRON)


@dataclass(frozen=True)
class Alias:
    """One of our keys, other projects' names for the same thing, and what differs."""

    key: str
    names: dict[str, tuple[str, ...]]
    note: str = field(default="")


def _row(key: str, megatron: str = "", torchtitan: str = "", hf: str = "", nanotron: str = "", note: str = "") -> Alias:
    columns = zip(PROJECTS, (megatron, torchtitan, hf, nanotron), strict=True)
    return Alias(key, {project: tuple(names.split()) for project, names in columns if names}, note)


ALIASES: tuple[Alias, ...] = (
    _row("run.name", "--wandb-exp-name", "", "run_name", "general.run"),
    _row("run.dir", "", "job.dump_folder", "output_dir", "", "checkpoints, logs and metrics live inside it"),
    _row("run.seed", "--seed", "training.seed debug.seed", "data_seed", "general.seed"),
    _row("run.device", "", "", "use_cpu no_cuda", ""),
    _row("run.timeout_seconds", "--distributed-timeout-minutes", "comm.train_timeout_seconds", "ddp_timeout", "",
         "seconds; the start and the first step have 30 minutes"),
    _row("model.preset", "", "model.flavor", "model_name_or_path config_name model_type", ""),
    _row("model.num_layers", "--num-layers", "model.n_layers", "num_hidden_layers n_layer", "num_hidden_layers"),
    _row("model.hidden_size", "--hidden-size", "model.dim d_model", "hidden_size n_embd", "hidden_size"),
    _row("model.num_attention_heads", "--num-attention-heads", "model.n_heads", "num_attention_heads n_head",
         "num_attention_heads num_heads"),
    _row("model.num_key_value_heads", "--num-query-groups --group-query-attention", "model.n_kv_heads",
         "num_key_value_heads", "num_key_value_heads num_kv_heads"),
    _row("model.head_dim", "--kv-channels", "", "head_dim", "head_size"),
    _row("model.ffn_hidden_size", "--ffn-hidden-size", "ffn_dim_multiplier multiple_of", "intermediate_size n_inner",
         "intermediate_size", "the width itself, already rounded"),
    _row("model.vocab_size", "--vocab-size --padded-vocab-size", "model.vocab_size", "vocab_size", "vocab_size",
         "without padding; tensor parallelism pads by itself"),
    _row("model.max_position_embeddings", "--max-position-embeddings", "model.max_seq_len", "n_positions n_ctx",
         "max_position_embeddings"),
    _row("model.norm", "--normalization", "model.norm_type", "", ""),
    _row("model.norm_eps", "--norm-epsilon --layernorm-epsilon", "model.norm_eps", "rms_norm_eps layer_norm_epsilon",
         "rms_norm_eps"),
    _row("model.activation", "--swiglu --squared-relu", "", "hidden_act activation_function", "hidden_act"),
    _row("model.position", "--position-embedding-type --use-rotary-position-embeddings", "", "", ""),
    _row("model.rope_theta", "--rotary-base", "model.rope_theta", "rope_theta", "rope_theta"),
    _row("model.rope_scaling", "--use-rope-scaling", "", "rope_scaling rope_parameters", "rope_scaling"),
    _row("model.rope_scaling.type", "", "", "rope_type", ""),
    _row("model.rope_scaling.factor", "--rope-scaling-factor", "rope_factor", "", ""),
    _row("model.qk_norm", "--qk-layernorm", "qk_norm", "use_qk_norm", ""),
    _row("model.qkv_bias", "--add-qkv-bias", "", "attention_bias", "attention_bias"),
    _row("model.linear_bias", "--disable-bias-linear --add-bias-linear", "", "mlp_bias", "mlp_bias",
         "without wq, wk, wv: see model.qkv_bias"),
    _row("model.tie_embeddings", "--untie-embeddings-and-output-weights", "enable_weight_tying", "tie_word_embeddings",
         "tie_word_embeddings"),
    _row("model.attention_window", "--window-size", "", "sliding_window", ""),
    _row("model.attention_dropout", "--attention-dropout", "", "attn_pdrop attention_dropout", ""),
    _row("model.hidden_dropout", "--hidden-dropout", "", "resid_pdrop embd_pdrop hidden_dropout_prob", ""),
    _row("model.init_std", "--init-method-std", "", "initializer_range", "model.init_method.std"),
    _row("parallel.dp", "--data-parallel-size", "parallelism.data_parallel_replicate_degree", "", "parallelism.dp"),
    _row("parallel.pp", "--pipeline-model-parallel-size", "parallelism.pipeline_parallel_degree", "", "parallelism.pp"),
    _row("parallel.tp", "--tensor-model-parallel-size", "parallelism.tensor_parallel_degree", "tp_size tp_plan",
         "parallelism.tp"),
    _row("parallel.cp", "--context-parallel-size", "parallelism.context_parallel_degree", "cp_size",
         "parallelism.context_parallel_size"),
    _row("parallel.ep", "--expert-model-parallel-size", "parallelism.expert_parallel_degree", "",
         "parallelism.expert_parallel_size"),
    _row("parallel.order", "--use-tp-pp-dp-mapping", "", "", ""),
    _row("parallel.sequence_parallel", "--sequence-parallel", "disable_loss_parallel", "", "tp_mode"),
    _row("parallel.zero_stage", "--use-distributed-optimizer", "parallelism.fsdp_reshard_after_forward",
         "fsdp zero_optimization", "optimizer.zero_stage", "1 masters and moments, 2 gradients too, 3 weights too"),
    _row("parallel.zero_size", "--num-distributed-optimizer-instances", "parallelism.data_parallel_shard_degree", "",
         "", "ranks that share one copy: dp · cp / instances"),
    _row("parallel.context.method", "--cp-comm-type", "parallelism.context_parallel_rotate_method", "", ""),
    _row("parallel.context.layout", "", "parallelism.context_parallel_load_balancer", "", ""),
    _row("parallel.context.ulysses", "--hierarchical-context-parallel-sizes", "", "sp_size ulysses_size", ""),
    _row("parallel.pipeline.schedule", "", "parallelism.pipeline_parallel_schedule", "", "parallelism.pp_engine"),
    _row("parallel.pipeline.virtual_stages", "--num-virtual-stages-per-pipeline-rank "
         "--num-layers-per-virtual-pipeline-stage", "parallelism.pipeline_parallel_layers_per_stage", "", ""),
    _row("parallel.pipeline.partition", "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
         "--pipeline-model-parallel-layout", "parallelism.module_fqns_per_model_part", "", ""),
    _row("data.train", "--data-path --train-data-path", "training.dataset training.dataset_path dataloader.dataset",
         "train_file dataset_name", "dataset dataset_folder", "a list of {path, weight}"),
    _row("data.valid", "--valid-data-path", "validation.dataset", "validation_file eval_dataset", ""),
    _row("data.split", "--split", "", "validation_split_percentage", "", "unquoted or quoted text, `98,1,1`"),
    _row("data.seq_length", "--seq-length", "training.seq_len", "block_size max_seq_length max_length",
         "tokens.sequence_length"),
    _row("data.document_mask", "--reset-attention-mask --reset-position-ids", "", "packing", ""),
    _row("data.tokenizer", "--tokenizer-type --tokenizer-model", "model.hf_assets_path model.tokenizer_path",
         "tokenizer_name", "tokenizer.tokenizer_name_or_path"),
    _row("data.workers", "--num-workers", "dataloader.num_workers", "dataloader_num_workers",
         "data.num_loading_workers"),
    _row("train.steps", "--train-iters", "training.steps", "max_steps num_train_steps", "tokens.train_steps"),
    _row("train.tokens", "--train-samples", "", "num_train_epochs", "", "a number of tokens, not of samples or epochs"),
    _row("train.global_batch_size", "--global-batch-size", "training.global_batch_size",
         "gradient_accumulation_steps train_batch_size", "tokens.batch_accumulation_per_replica",
         "samples over all ranks; accumulation follows from it"),
    _row("train.micro_batch_size", "--micro-batch-size", "training.local_batch_size "
         "parallelism.pipeline_parallel_microbatch_size", "per_device_train_batch_size", "tokens.micro_batch_size"),
    _row("train.precision", "--bf16 --fp16", "training.dtype training.mixed_precision_param",
         "bf16 fp16 torch_dtype mixed_precision dtype", "model.dtype"),
    _row("train.recompute", "--recompute-granularity --recompute-activations --recompute-method",
         "activation_checkpoint.mode activation_checkpoint", "gradient_checkpointing", "parallelism.recompute_layer"),
    _row("train.grad_clip", "--clip-grad", "training.max_norm", "max_grad_norm gradient_clipping",
         "optimizer.clip_grad"),
    _row("optimizer.name", "--optimizer", "optimizer.name", "optim", "optimizer.optimizer_factory.name"),
    _row("optimizer.lr", "--lr", "optimizer.lr", "learning_rate", "optimizer.learning_rate_scheduler.learning_rate"),
    _row("optimizer.betas", "--adam-beta1 --adam-beta2", "optimizer.beta1 optimizer.beta2", "adam_beta1 adam_beta2",
         "optimizer.optimizer_factory.adam_beta1 optimizer.optimizer_factory.adam_beta2", "a list of two"),
    _row("optimizer.eps", "--adam-eps", "optimizer.eps", "adam_epsilon", "optimizer.optimizer_factory.adam_eps"),
    _row("optimizer.weight_decay", "--weight-decay", "optimizer.weight_decay", "weight_decay",
         "optimizer.weight_decay"),
    _row("lr_schedule.name", "--lr-decay-style", "lr_scheduler.decay_type", "lr_scheduler_type",
         "lr_decay_style"),
    _row("lr_schedule.warmup_steps", "--lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction",
         "lr_scheduler.warmup_steps", "warmup_steps warmup_ratio num_warmup_steps", "lr_warmup_steps"),
    _row("lr_schedule.decay_steps", "--lr-decay-iters --lr-wsd-decay-iters", "lr_scheduler.decay_ratio", "",
         "lr_decay_steps"),
    _row("lr_schedule.min_lr", "--min-lr", "lr_scheduler.min_lr_factor", "lr_scheduler_kwargs", "min_decay_lr",
         "a rate, not a factor"),
    _row("eval.every", "--eval-interval", "validation.freq", "eval_steps", "tokens.val_check_interval"),
    _row("eval.batches", "--eval-iters", "validation.steps", "", "tokens.limit_val_batches"),
    _row("checkpoint.dir", "--save", "checkpoint.folder", "", "checkpoints.checkpoints_path"),
    _row("checkpoint.every", "--save-interval", "checkpoint.interval", "save_steps",
         "checkpoints.checkpoint_interval"),
    _row("checkpoint.keep", "", "checkpoint.keep_latest_k", "save_total_limit", ""),
    _row("checkpoint.keep_every", "--save-retain-interval", "", "", ""),
    _row("checkpoint.asynchronous", "--async-save", "checkpoint.async_mode", "", ""),
    _row("checkpoint.resume", "--load --ckpt-step", "checkpoint.load_step", "resume_from_checkpoint",
         "checkpoints.resume_checkpoint_path"),
    _row("checkpoint.init_from", "--pretrained-checkpoint --finetune", "checkpoint.initial_load_path", "",
         "init_method.path"),
    _row("kernels.attention", "--attention-backend --use-flash-attn", "", "attn_implementation",
         "_attn_implementation"),
    _row("kernels.loss", "--cross-entropy-loss-fusion", "", "use_liger_kernel", ""),
    _row("logging.every", "--log-interval", "metrics.log_freq", "logging_steps",
         "logging.iteration_step_info_interval"),
    _row("logging.tensorboard", "--tensorboard-dir", "metrics.enable_tensorboard", "report_to",
         "general.tensorboard_logger"),
    _row("logging.wandb", "--wandb-project", "metrics.enable_wandb", "", "general.project"),
    _row("logging.profile", "--profile --profile-step-start", "profiling.enable_profiling profiling.profile_freq", "",
         "profiler"),
    _row("logging.parameter_norms", "--log-params-norm", "", "", ""),
)

SECTIONS: dict[str, str] = {
    "training": "train", "trainer": "train", "parallelism": "parallel", "distributed": "parallel", "mesh": "parallel",
    "lr_scheduler": "lr_schedule", "scheduler": "lr_schedule", "learning_rate_scheduler": "lr_schedule",
    "optim": "optimizer", "checkpoints": "checkpoint", "checkpointing": "checkpoint", "dataset": "data",
    "datasets": "data", "dataloader": "data", "tokenizer": "data.tokenizer", "validation": "eval", "evaluation": "eval",
    "metrics": "logging", "log": "logging", "wandb": "logging.wandb", "profiling": "logging.profile", "job": "run",
    "general": "run", "tokens": "train", "kernel": "kernels", "pipeline": "parallel.pipeline",
    "context": "parallel.context",
}
"""Other frameworks' sections and the section here that holds their keys."""

LATER: dict[str, str] = {
    "model.moe": "mixture of experts (model.moe) is",
    "model.mla": "multi-head latent attention (model.mla) is",
    "train.fp8": "fp8 training (train.fp8) is",
    "num_experts": "mixture of experts (model.moe) is",
    "num_local_experts": "mixture of experts (model.moe) is",
    "moe_router_topk": "mixture of experts (model.moe) is",
    "num_experts_per_tok": "mixture of experts (model.moe) is",
    "multi_latent_attention": "multi-head latent attention (model.mla) is",
    "kv_lora_rank": "multi-head latent attention (model.mla) is",
    "q_lora_rank": "multi-head latent attention (model.mla) is",
    "fp8_format": "fp8 training (train.fp8) is",
    "fp8_recipe": "fp8 training (train.fp8) is",
}
"""Families of later versions: a key, or another framework's name for one -> the subject of "… not in this version"."""
