"""List the keys of other tools: Axolotl, TRL, transformers, LLaMA-Factory, Composer and torchtune.

Each entry says what to write for brim, with the user's value in brim's form, or why nothing is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brim.config.foreign import values as form
from brim.config.foreign.values import Convert, Help


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """Names that mean one thing. A `*` at a name's end stands for any ending; a dot for the section around it."""

    names: tuple[str, ...]
    answer: Callable[[Any], Help]
    target: str = ""  # brim's key; empty where there is none
    example: Any = None  # a value that other tools' users write


def _to(target: str, example: Any, names: str, *, convert: Convert | None = None, words: str = "") -> ForeignKey:
    """A key of brim. convert: gives brim's value, or a Help where that is not simply another value."""

    def answer(value: Any) -> Help:
        made = value if convert is None else convert(value)
        return made if isinstance(made, Help) else Help(lines=((target, made),), words=words)

    return ForeignKey(names=tuple(names.split()), answer=answer, target=target, example=example)


def _no(words: str, names: str, *, off_counts: bool = False) -> ForeignKey:
    """Nothing to write in brim's configuration. off_counts: false, 0 and the like ask for something, too."""

    def answer(value: Any) -> Help:
        return Help(words=words, is_idle=form.is_off(value) and not off_counts)

    return ForeignKey(names=tuple(names.split()), answer=answer)


_LENGTH = (
    _to("trainer.epochs", 3, "num_epochs num_train_epochs max_epochs n_epochs"),
    _to("trainer.epochs", "3ep", "max_duration", convert=form.run_length),
    _to("trainer.train_steps", 500, "max_steps max_train_steps", convert=form.num_steps),
    _to("trainer.early_stop", 3, "early_stopping_patience"),
)


_BATCH = (
    _to(
        "trainer.batch_size",
        2,
        "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size device_train_microbatch_size "
        "device_train_batch_size train_micro_batch_size_per_gpu",
        convert=form.micro_batch,
    ),
    _to(
        "trainer.eval_batch_size",
        4,
        "per_device_eval_batch_size per_gpu_eval_batch_size device_eval_batch_size device_eval_microbatch_size",
    ),
    _to("trainer.gradient_accumulation_steps", 4, "accumulate_grad_batches gradient_accumulation"),
    _to("trainer.effective_batch_size", 32, "global_train_batch_size global_batch_size train_batch_size"),
    _to(
        "trainer.initial_effective_batch_size",
        8,
        # The second as bert24's pull request spells it.
        "initial_global_train_batch_size inital_global_train_batch_size batch_size_warmup_min_size",
        words="trainer.batch_rampup says how long the ramp from there is",
    ),
    _to("trainer.batch_rampup", "0.1dur", "batch_size_warmup batch_size_warmup_tokens", convert=form.ramp),
    _to("trainer.batch_rampup", [16, 8, 5000], "rampup_batch_size", convert=form.ramp),
    _to("trainer.batch_schedule", "0sp:8 400sp:16", "step_batch_size_schedule"),
    ForeignKey(names=("auto_find_batch_size",), answer=lambda value: form.CUT_BY_MEMORY),
)


_RATE = (
    _to("trainer.learning_rate", 0.0002, "lr max_lr peak_lr"),
    _to(f"{form.SCHEDULER}.warmup_fraction", 0.03, "warmup_ratio"),
    _to(
        f"{form.SCHEDULER}.warmup_length",
        100,
        "warmup_steps num_warmup_steps t_warmup lr_warmup_steps",
        convert=form.warm_up,
    ),
    _to(f"{form.SCHEDULER}.decay", "cosine", "lr_scheduler lr_scheduler_type", convert=form.choice(form.SCHEDULES)),
    _to(f"{form.SCHEDULER}.eta_min", 0.00001, "min_lr lr_end"),
    _no(
        f"the key is {form.SCHEDULER}.eta_min: the rate itself at which a decay ends, here this share of "
        "trainer.learning_rate",
        "cosine_min_lr_ratio min_lr_ratio min_lr_rate alpha_f",
    ),
    _no(f"its keys stand in {form.SCHEDULER} itself, such as eta_min", "lr_scheduler_kwargs"),
)


_OPTIMIZER = (
    _to("trainer.optimizer.type", "adamw_torch", "optimizer optim", convert=form.optimizer),
    _to("trainer.optimizer.betas", {"lr": 0.001, "betas": [0.9, 0.95]}, "optimizer.params", convert=form.nested),
    _to("trainer.optimizer.eps", 1e-8, "adam_epsilon optimizer.epsilon"),
    _no("the key is trainer.optimizer.betas, for both: such as [0.9, 0.95]", "adam_beta1 adam_beta2", off_counts=True),
    _no("its keys stand in trainer.optimizer itself, such as betas and eps", "optim_args optimizer_kwargs"),
    _to(
        "trainer.gradient_clipping.clipglobalnorm",
        1.0,
        "max_grad_norm gradient_clip_val clip_grad_norm grad_clip gradient_clip_norm",
        convert=form.clipped,
    ),
    _to(
        "trainer.enable_gradient_checkpointing",
        True,
        "gradient_checkpointing enable_activation_checkpointing activation_checkpointing use_gradient_checkpointing",
        convert=form.checkpointing,
    ),
    _no(
        "remove it: brim has one way to recompute activations",
        "gradient_checkpointing_kwargs activation_checkpointing_reentrant enable_activation_offloading",
    ),
)


_CHECKPOINTS = (
    _to(
        "trainer.steps_per_checkpoint",
        500,
        "save_steps eval_steps save_interval eval_interval",
        convert=form.steps_between,
        words="brim evaluates at each checkpoint",
    ),
    _to(
        "trainer.checkpoints_per_epoch", 4, "saves_per_epoch evals_per_epoch", words="brim evaluates at each checkpoint"
    ),
    _no(
        "remove it: brim saves and evaluates at the end of each epoch; trainer.steps_per_checkpoint or "
        "checkpoints_per_epoch make it more often, skip_all_evaluation: true leaves the evaluations out",
        "save_strategy eval_strategy evaluation_strategy",
        off_counts=True,
    ),
    _no("remove it: brim evaluates once it has learned something", "eval_on_start"),
    _no(
        "remove it: brim keeps the newest two checkpoints and the best",
        "save_total_limit save_top_k save_num_checkpoints_to_keep save_only_model",
    ),
    _no("remove it: brim writes safetensors, and nothing else", "save_safetensors", off_counts=True),
    _no(
        "remove it: a run's folder `model` holds the best evaluation's weights",
        "load_best_model_at_end",
        off_counts=True,
    ),
    _to(
        "trainer.validation_metric",
        "eval_loss",
        "metric_for_best_model",
        convert=form.choice({"eval_loss": "loss", "eval/loss": "loss"}),
    ),
    _no("remove it: brim knows of each of its metrics which way is better", "greater_is_better", off_counts=True),
    _no("give it to the command: brim train CONFIG --output-directory DIR", "output_dir save_folder output_directory"),
    _no("remove it: brim begins no run in a folder that holds one", "overwrite_output_dir"),
    _no(
        "give it to the command: brim train CONFIG --resume (with the --output-directory of the run)",
        "resume_from_checkpoint auto_resume_from_checkpoints autoresume load_path resume ckpt_path",
    ),
    _no("send the trained model with `brim upload RUN ORG/NAME`", "hub_model_id hub_strategy push_to_hub"),
)


_LOGS = (
    _no(
        "remove it: metrics.jsonl in the run's folder has a line for each update",
        "logging_steps log_interval log_every_n_steps logging_strategy logging_first_step eval_table_size "
        "include_tokens_per_second log_peak_memory_stats",
    ),
    _no(
        "remove it: brim writes metrics.jsonl and TensorBoard files into the run's folder, and to no service",
        "report_to wandb_* use_wandb mlflow_* use_mlflow hf_mlflow_log_artifacts comet_* use_comet swanlab_* "
        "use_swanlab trackio_* loggers logging_dir metric_logger use_tensorboard run_name experiment_name",
    ),
    _no("remove it: what a run decides stands in its plan.json", "debug log_level disable_tqdm"),
    _no(
        "remove it: a loss that is no number ends the run (trainer.on_nonfinite), another one does not",
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
)


_TASK = (
    _to("trainer.type", "sft", "stage", convert=form.choice({"sft": "finetune", "pt": "finetune"})),
    _no(
        "training on preferences or rewards is not supported yet: trainer.type is none or finetune",
        "rl rl_beta reward_model pref_beta pref_loss",
    ),
    _no(
        "remove it: `brim train`, `brim evaluate` and `brim predict` say what is done",
        "do_train do_eval do_predict",
        off_counts=True,
    ),
    _no(
        "generate while evaluating with `brim evaluate RUN --texts`",
        "predict_with_generate do_causal_lm_eval eval_causal_lm_metrics",
    ),
    _no(
        "not supported yet; remove it",
        "label_smoothing_factor relora* curriculum_sampling neftune_noise_alpha profiler profiler_steps",
    ),
    _no("torch.compile is not supported yet; remove it", "torch_compile* compile"),
    _no(
        "remove it: brim computes the loss in chunks (trainer.chunked_loss: auto), and has no other kernels of its own",
        "use_liger_kernel enable_liger_kernel liger_* plugins lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "cut_cross_entropy use_unsloth",
    ),
    _to("generation.max_new_tokens", 128, "eval_max_new_tokens max_completion_length"),
)


_MODEL = (
    _to("base_model", "org/model", "model_name_or_path model_name model_id model_path base_model_config model"),
    _no(
        "remove it: the base model's folder says of what class it is", "is_llama_derived_model is_mistral_derived_model"
    ),
    _no(
        "remove it: brim takes the tokenizer that comes with base_model",
        "tokenizer tokenizer_type tokenizer_config tokenizer_name tokenizer_name_or_path tokenizer_padding_side",
    ),
    _no(
        "remove it: brim takes the tokenizer as it comes with base_model, the fast one",
        "tokenizer_use_fast tokenizer_legacy use_fast_tokenizer",
        off_counts=True,
    ),
    _no(
        "remove it: brim takes the tokens that come with base_model, and adds none",
        "special_tokens tokens added_tokens_overrides add_tokens eot_tokens eos_token pad_token bos_token resize_vocab "
        "resize_token_embeddings_to_32x",
    ),
    _no("download that revision, and name its folder in base_model", "revision model_revision revision_of_model"),
    _to("initialize", True, "random_init_weights train_from_scratch", convert=form.switch(("initialize", "random"))),
    _no(
        "other settings of the base model are not supported yet: it is taken as its config.json says",
        "overrides_of_model_config overrides_of_model_kwargs rope_scaling",
    ),
    _no("remove it: brim refuses what it does not know in any case", "strict"),
    _no(
        "remove it: where the Hub asks for a token, brim takes HF_TOKEN from the environment",
        "hf_use_auth_token use_auth_token hub_token hf_hub_token",
    ),
    _no(
        "several GPUs are not supported yet, and one needs no such key: remove it",
        "deepspeed* fsdp* ddp_* device_map local_rank n_gpu num_gpus tensor_parallel_size context_parallel_size "
        "sequence_parallel_degree parallelism_config",
    ),
    _to("memory.budget", 20, "gpu_memory_limit", convert=form.gibibytes),
    _to("random_seed", 42, "seed random_state data_seed"),
)


_PRECISION = (
    _to("precision", True, "bf16 bf16_full_eval", convert=form.bfloat16),
    _to(
        "precision",
        True,
        "fp16 fp16_full_eval float16",
        convert=form.switch(("precision", "fp16-mixed"), words="left out, brim takes it where the GPU has no bfloat16"),
    ),
    _to("precision", True, "bfloat16 pure_bf16", convert=form.switch(("precision", "bf16-true"))),
    _to("precision", "bfloat16", "torch_dtype dtype", convert=form.choice(form.DTYPES)),
    _to("precision", "bf16", "mixed_precision", convert=form.choice({**form.PRECISIONS, "no": "fp32"})),
    _no("remove it: brim leaves TF32 as PyTorch has it", "tf32"),
    _to(
        form.KERNEL,
        True,
        "flash_attention flash_attn use_flash_attention_2 flash_attention_2 attn_impl",
        convert=form.choice(form.KERNELS),
    ),
    _to(form.KERNEL, True, "sdp_attention", convert=form.switch((form.KERNEL, "sdpa"))),
    _to(form.KERNEL, True, "eager_attention", convert=form.switch((form.KERNEL, "eager"))),
    _no(
        f"remove it: brim takes sdpa where the architecture has it ({form.KERNEL})",
        "xformers_attention s2_attention flex_attention sage_attention",
    ),
)


_ADAPTER = (
    _to("adapter.type", "lora", "finetuning_type peft_type", convert=form.choice(form.ADAPTERS)),
    _to("adapter.r", 16, "lora_r lora_rank rank"),
    _to("adapter.alpha", 32, "lora_alpha"),
    _to("adapter.dropout", 0.05, "lora_dropout"),
    _to("adapter.bias_type", "none", "lora_bias bias"),
    _to(
        "adapter.target_modules",
        ["q_proj", "v_proj"],
        "lora_target_modules lora_target lora_attn_modules",
        convert=form.modules,
    ),
    _to(
        "adapter.target_modules",
        True,
        "lora_target_linear",
        convert=form.switch(("adapter.target_modules", "all-linear")),
    ),
    _no(
        "name the layers in adapter.target_modules, or all-linear",
        "apply_lora_to_mlp apply_lora_to_output",
        off_counts=True,
    ),
    _no(
        "not supported yet: brim trains the adapter's matrices alone",
        "lora_modules_to_save modules_to_save additional_target",
    ),
    _no("remove it: PEFT knows it of each layer", "lora_fan_in_fan_out fan_in_fan_out task_type inference_mode"),
    _no(
        "an adapter in some layers: adapter.target_modules takes a regular expression over the layers' names",
        "peft_layers_to_transform lora_layers_to_transform layers_to_transform layers_pattern",
    ),
    _no("a learning rate per matrix (LoRA+) is not supported yet; remove it", "loraplus_*"),
    _to("adapter.use_dora", True, "peft_use_dora"),
    _to("adapter.use_rslora", True, "peft_use_rslora"),
    _to("adapter.init_lora_weights", "gaussian", "peft_init_lora_weights"),
    _to("adapter.pretrained_adapter_weights", "adapter-folder", "lora_model_dir adapter_name_or_path"),
    _no(
        "set adapter: lora, and its keys r, alpha, dropout and target_modules there", "peft_config lora_config use_peft"
    ),
    _to("quantization.bits", True, "load_in_4bit use_qlora", convert=form.switch(("quantization.bits", 4))),
    _to("quantization.bits", True, "load_in_8bit", convert=form.switch(("quantization.bits", 8))),
    _to("quantization.bits", 4, "quantization_bit", convert=form.choice(form.BITS)),
    _to("quantization.bnb_4bit_use_double_quant", True, "double_quantization bnb_4bit_use_nested_quant"),
    _no(
        "set quantization: {bits: 4}, with bnb_4bit_quant_type and the like there",
        "bnb_config_kwargs quantization_config quantization_method",
    ),
    _no("a base in GPTQ or AWQ is not supported yet; set quantization: {bits: 4} over a plain one", "gptq*"),
)


_ANSWERS_ALONE = (
    "remove it: brim learns the answers alone; for plain text set prompt.template: '' and the text as the answer"
)


_DATA = (
    _to(
        "dataset",
        [{"path": "rows.jsonl", "type": "alpaca"}],
        "datasets data_files data_path train_file train_data train_dataset dataset_name dataset_path",
        convert=form.data_file,
    ),
    _to(form.SHARES, 0.05, "val_set_size val_size test_size validation_split", convert=form.held_out),
    _no(
        "name that file in dataset, too, give all rows a column `split` of train, validation and test, and set "
        "preprocessing.split: fixed",
        "eval_dataset test_datasets validation_file eval_file",
    ),
    _to(
        "preprocessing.global_max_sequence_length",
        2048,
        "sequence_len cutoff_len max_seq_length max_seq_len max_length model_max_length block_size",
    ),
    _no(
        "remove it: brim cuts each effective batch by its rows' lengths, so that little is padded; nothing is packed, "
        "and each row is seen alone",
        "sample_packing* sample_pack_* eval_sample_packing eval_packing packing* neat_packing padding_free "
        "pad_to_sequence_len pad_to_max_length group_by_length length_column_name batch_flattening "
        "multipack_real_batches",
    ),
    _to("preprocessing.sample_size", 1000, "max_samples max_train_samples"),
    _no(
        "remove it: brim reads and prepares the data by itself",
        "dataset_prepared_path dataset_processes dataset_num_proc preprocessing_num_workers dataloader_* num_workers "
        "dataset_keep_in_memory overwrite_cache tokenized_path remove_unused_columns dataset_dir",
    ),
    _no(
        "remove it: training rows come in a new order in each epoch", "shuffle shuffle_merged_datasets", off_counts=True
    ),
    _no(
        "`brim check` names rows that repeat others (--rows FILE writes them); take them out of the file",
        "dataset_exact_deduplication",
    ),
    _no(
        _ANSWERS_ALONE,
        "train_on_inputs train_on_input train_on_prompt",
    ),
    _no(
        _ANSWERS_ALONE,
        "completion_only_loss assistant_only_loss train_on_responses_only mask_prompt roles_to_train train_on_eos",
        off_counts=True,
    ),
    _to("chat.supervise", True, "mask_history", convert=form.switch(("chat.supervise", "last"))),
    _to("chat.template", "chatml.jinja", "chat_template chat_template_jinja", convert=form.template_file),
    _no(
        "name the columns in prompt.template, as {column}, and the answer's in output_features",
        "dataset_text_field text_column prompt_column response_column field_* column_mapping",
    ),
)


FOREIGN_KEYS: tuple[ForeignKey, ...] = (
    *_LENGTH,
    *_BATCH,
    *_RATE,
    *_OPTIMIZER,
    *_CHECKPOINTS,
    *_LOGS,
    *_TASK,
    *_MODEL,
    *_PRECISION,
    *_ADAPTER,
    *_DATA,
)


# Values of brim's own keys, and bare values for its sections, as other tools write them.
FOREIGN_VALUES: tuple[ForeignKey, ...] = (
    _to("adapter.type", "qlora", "adapter.type", convert=form.choice(form.ADAPTERS)),
    _to("trainer.optimizer.type", "adamw_torch", "trainer.optimizer.type", convert=form.choice(form.OPTIMIZERS)),
    _to(
        f"{form.SCHEDULER}.decay",
        "constant_with_warmup",
        f"{form.SCHEDULER}.decay {form.SCHEDULER}",
        convert=form.choice(form.SCHEDULES),
    ),
    _to("trainer.gradient_clipping.clipglobalnorm", 1.0, "trainer.gradient_clipping", convert=form.clipped),
    _to("quantization.bits", "nf4", "quantization", convert=form.choice(form.BITS)),
    _to("precision", "bf16", "precision", convert=form.choice(form.PRECISIONS)),
    _to(form.KERNEL, "fa2", form.KERNEL, convert=form.choice(form.KERNELS)),
    _no("remove it: the base model's folder says of what class it is", "model_type"),
)
