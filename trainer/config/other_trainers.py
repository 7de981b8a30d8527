"""What other trainers call our fields and their values, for hints in errors.

They are Hugging Face's TrainingArguments, PEFT, TRL, axolotl, LLaMA-Factory, ms-swift, torchtune,
MaxText and Megatron.
"""

from collections.abc import Mapping


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Name -> meaning, of a table from a meaning to names with spaces between them."""
    return {name: meaning for meaning, names in table.items() for name in names.split()}


# Their name -> our field.
MEANT = _by_name(
    {
        "adapter.alpha": "lora_alpha",
        "adapter.dropout": "lora_dropout",
        "adapter.path": "adapter_name_or_path lora_model_dir resume_adapters",
        "adapter.quantize": (
            "load_in_4bit load_in_8bit quant_bits quant_method quantization_bit quantization_method"
        ),
        "adapter.rank": "finetuning_type lora_r lora_rank train_type tuner_type",
        "adapter.targets": "lora_target lora_target_linear lora_target_modules target_modules",
        "adapter.train": "lora_modules_to_save modules_to_save",
        "attention.kernel": (
            "attn_implementation flash_attention flash_attn sdp_attention xformers_attention"
        ),
        "checkpoint.best": "load_best_model_at_end metric_for_best_model",
        "checkpoint.best_is": "greater_is_better",
        "checkpoint.every": (
            "checkpoint_period save_interval save_steps save_strategy saves_per_epoch"
        ),
        "checkpoint.keep": "save_total_limit",
        "checkpoint.patience": "early_stopping_patience",
        "compile_cache": "jax_cache_dir",
        "data.add_control_tokens": "add_special_tokens add_tokens new_special_tokens",
        "data.chat_template_kwargs": "enable_thinking",
        "data.context_length": (
            "block_size cutoff_len max_length max_model_len max_seq_len max_seq_length "
            "max_target_length model_max_length seq_len seq_length sequence_len sequence_length"
        ),
        "data.held_out_fraction": (
            "eval_fraction split_dataset_ratio val_set_size val_size val_split"
        ),
        "data.held_out_path": "eval_dataset eval_file validation_file",
        "data.path": "data_files data_path dataset dataset_name hf_path train_file",
        "data.prepared": "dataset_prepared_path tokenized_path",
        "data.sources": "dataset_mixer datasets",
        "data.template": "chat_template chat_template_jinja chat_template_path",
        "data.train_on": (
            "assistant_only_loss completion_only_loss mask_history mask_prompt roles_to_train "
            "train_on_inputs train_on_prompt train_on_responses_only"
        ),
        "logging.wandb": "report_to use_wandb wandb_project",
        "memory.remat": (
            "activation_checkpointing gradient_checkpointing gradient_checkpointing_kwargs "
            "recompute_activations remat_policy"
        ),
        "mesh.data": "dp_replicate dp_replicate_size ici_data_parallelism",
        "mesh.expert": "expert_model_parallel_size expert_parallel_size ici_expert_parallelism",
        "mesh.fsdp": (
            "deepspeed dp_shard dp_shard_size fsdp_config fsdp_size ici_fsdp_parallelism zero_stage"
        ),
        "mesh.sequence": (
            "context_parallel_degree context_parallel_size cp ici_context_parallelism "
            "ici_sequence_parallelism ring_size sequence_parallel_degree sequence_parallel_size "
            "sp_degree"
        ),
        "mesh.tensor": (
            "ici_tensor_parallelism tensor_model_parallel_size tensor_parallel_degree "
            "tensor_parallel_size tp tp_size"
        ),
        "model.compute_dtype": "bf16 dtype fp16 mixed_precision precision torch_dtype",
        "model.overrides": "rope_scaling rope_theta",
        "model.path": (
            "base_model checkpoint_dir hf_model load_parameters_path load_path model_id "
            "model_id_or_path model_name model_name_or_path pretrained"
        ),
        "model.tokenizer": "tokenizer_name_or_path",
        "model.trainable": (
            "freeze_parameters freeze_trainable_layers trainable_parameters unfrozen_parameters"
        ),
        "name": "run_name wandb_name",
        "optimizer.beta1": "adam_b1 adam_beta1",
        "optimizer.beta2": "adam_b2 adam_beta2",
        "optimizer.clip_norm": (
            "clip_grad grad_clip gradient_clipping gradient_clipping_threshold max_grad_norm"
        ),
        "optimizer.epsilon": "adam_eps adam_epsilon",
        "optimizer.final_fraction": (
            "cosine_learning_rate_final_fraction cosine_min_lr_ratio lr_min min_lr min_lr_rate "
            "min_lr_ratio"
        ),
        "optimizer.learning_rate": "lr max_lr peak_lr",
        "optimizer.name": "optim optimizer_type",
        "optimizer.schedule": "lr_decay_style lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optimizer.warmup_fraction": "lr_warmup_fraction warmup_ratio warmup_steps_fraction",
        "optimizer.warmup_steps": "lr_warmup num_warmup_steps warmup warmup_iters",
        "preference.beta": "dpo_beta pref_beta rl_beta",
        "preference.loss": "loss_type pref_loss rl rlhf_type",
        "preference.sft_weight": "pref_ftx rpo_alpha",
        "run_dir": "base_output_directory logdir logging_dir out_dir output_dir save_dir",
        "train.accumulation": (
            "accumulate_grad_batches grad_accum gradient_accumulation gradient_accumulation_steps"
        ),
        "train.batch_size": (
            "batch bs global_batch_size micro_batch_size per_device_batch_size "
            "per_device_train_batch_size"
        ),
        "train.epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
        "train.evaluate_every": (
            "eval_every eval_interval eval_steps eval_strategy evals_per_epoch evaluation_strategy"
        ),
        "train.log_every": "log_freq log_interval log_period logging_steps",
        "train.steps": (
            "iters learning_rate_schedule_steps max_iters max_steps num_steps total_steps "
            "train_iters"
        ),
    }
)

# Their name -> what follows our field's name in a hint.
REMARKS = _by_name(
    {
        ", a share of the peak": "cosine_min_lr_ratio lr_min min_lr",
        ", the devices that share a model's state": "deepspeed fsdp_config zero_stage",
        ", such as {enable_thinking: false}": "enable_thinking",
        ", a number of steps": (
            "eval_strategy evals_per_epoch evaluation_strategy save_strategy saves_per_epoch"
        ),
        ", with which 0 trains all weights": "finetuning_type train_type tuner_type",
        " nf4, if true": "load_in_4bit",
        " int8, if true": "load_in_8bit",
        " all-linear, the default": "lora_target_linear",
        " last, if true": "mask_history",
        ", rows of a step over all devices and microbatches": (
            "micro_batch_size per_device_batch_size per_device_train_batch_size"
        ),
        " nf4, or int8": "quant_bits quantization_bit",
        ", a project's name, or logging.tensorboard": "report_to",
        " everything, if true": "train_on_inputs train_on_prompt",
        " all, the default": "train_on_responses_only",
        ", a share": "val_set_size",
    }
)

# Their name -> why we have no such field.
NO_FIELD = _by_name(
    {
        "the same command continues its run": "auto_resume_from_checkpoints resume_from_checkpoint",
        "the path names the split's file or folder": "dataset_split split train_split",
        "train.py trains": "do_train",
        "a system text is a record's own": "default_system default_system_message system",
        "held-out losses are measured with train.batch_size": (
            "eval_batch_size per_device_eval_batch_size"
        ),
        "rows are always packed with documents": (
            "eval_sample_packing group_by_length neat_packing packed packing pad_to_sequence_len "
            "sample_packing"
        ),
        "long conversations are split between turns": "excess_length_strategy truncation_strategy",
        "scripts.push_to_hub uploads an exported model": "hub_model_id hub_strategy push_to_hub",
        "preference.label_smoothing is for pairs; fine-tuning has none": "label_smoothing",
        "there is no label smoothing for fine-tuning": "label_smoothing_factor",
        "there is no LoRA+": "lora_plus_lr_ratio lorap_lr_ratio loraplus_lr_ratio",
        "a source's weight, such as 0.1, takes a share of it in each epoch": "max_samples",
        "the model's config.json names it": "model_type",
        "there is no NEFTune": "neftune_alpha neftune_noise_alpha noisy_embedding_alpha",
        "another run_dir begins another run; none is overwritten": "overwrite_output_dir",
        "scripts.export_hf writes the model without the optimizer's state": "save_only_model",
        "they are the tokenizer's, as its files name them": "special_tokens",
        "stages is a curriculum; preferences are sources with format: preference": "stage",
        "the tokenizer's files say it": "tokenizer_type",
        "the token that ends a trained answer is trained on": "train_on_eos train_on_eot",
        "no code from a model's repository runs": "trust_remote_code",
    }
)

# Our field -> their name of a value -> ours.
MEANT_VALUES = {
    "adapter.quantize": _by_name({"nf4": "4 4bit bitsandbytes bnb fp4", "int8": "8 8bit"}),
    "optimizer.name": _by_name(
        {
            "adamw": "adamw_hf adamw_torch adamw_torch_fused paged_adamw paged_adamw_32bit",
            "adamw with optimizer.moment_dtype 8bit": (
                "adamw_8bit adamw_bnb_8bit paged_adamw_8bit"
            ),
        }
    ),
    "optimizer.schedule": _by_name(
        {
            "constant with optimizer.warmup_steps": "constant_with_warmup",
            "cosine with optimizer.final_fraction": "cosine_with_min_lr",
            "linear with optimizer.warmup_steps": "linear_with_warmup",
            "wsd with optimizer.warmup_steps": "warmup_stable_decay",
        }
    ),
    "preference.loss": _by_name({"sigmoid": "dpo"}),
}
