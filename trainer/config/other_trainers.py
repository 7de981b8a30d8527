"""What other trainers call our fields and their values, for hints in errors and docs/migrating.md.

They are Hugging Face's TrainingArguments, PEFT, TRL, axolotl, LLaMA-Factory, ms-swift, torchtune,
MaxText and Megatron.
"""

from collections.abc import Mapping


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Inverts a table from meanings to names separated by spaces: name -> meaning."""
    return {name: meaning for meaning, names in table.items() for name in names.split()}


# Our section that they use as a field -> our field.
MEANT_SECTIONS = {
    "adapter": "adapter.rank",
    "checkpoint": "model.path",
    "data": "data.path",
    "model": "model.path",
    "optimizer": "optimizer.name",
}

# Their name -> our field.
MEANT = _by_name(
    {
        "adapter.alpha": "lora_alpha",
        "adapter.dropout": "lora_dropout",
        "adapter.path": "adapter_name_or_path adapters lora_model_dir resume_adapters",
        "adapter.quantize": (
            "bnb_4bit_quant_type load_in_4bit load_in_8bit quant_bits quant_method "
            "quantization_bit quantization_method"
        ),
        "adapter.rank": "finetuning_type lora_r lora_rank r train_type tuner_type use_peft",
        "adapter.targets": (
            "apply_lora_to_mlp apply_lora_to_output lora_attn_modules lora_target "
            "lora_target_linear lora_target_modules target_modules target_regex"
        ),
        "adapter.train": "additional_target lora_modules_to_save modules_to_save",
        "adapter.use_dora": "peft_use_dora",
        "adapter.use_rslora": "peft_use_rslora",
        "attention.kernel": (
            "attention_backend attn_impl attn_implementation flash_attention flash_attn "
            "flex_attention sdp_attention xformers_attention"
        ),
        "checkpoint.best": "load_best_model_at_end metric_for_best_model",
        "checkpoint.best_is": "greater_is_better",
        "checkpoint.every": (
            "checkpoint_period save_every_n_epochs save_every_n_steps save_interval save_steps "
            "save_strategy saves_per_epoch"
        ),
        "checkpoint.keep": "save_total_limit",
        "checkpoint.patience": "early_stop_interval early_stopping_patience",
        "compile_cache": "jax_cache_dir",
        "data.add_control_tokens": "add_special_tokens add_tokens new_special_tokens",
        "data.chat_template_kwargs": "enable_thinking",
        "data.context_length": (
            "block_size cutoff_len max_length max_model_len max_seq_len max_seq_length "
            "max_target_length model_max_length packing_length seq_len seq_length sequence_len "
            "sequence_length"
        ),
        "data.held_out_fraction": (
            "eval_fraction split_dataset_ratio val_set_size val_size val_split"
        ),
        "data.held_out_path": (
            "dataset_val eval_dataset eval_file test_datasets val_dataset validation_file"
        ),
        "data.path": "data_files data_path dataset dataset_name hf_path train_file",
        "data.prepared": "cached_dataset dataset_prepared_path tokenized_path",
        "data.seed": "data_seed",
        "data.sources": "dataset_mixer datasets pretraining_dataset",
        "data.template": "chat_template chat_template_jinja chat_template_path prompt_template",
        "data.train_on": (
            "assistant_only_loss completion_only_loss loss_scale mask_history mask_prompt "
            "roles_to_train train_on_input train_on_inputs train_on_prompt train_on_responses_only"
        ),
        "distributed.coordinator": "master_addr master_port",
        "distributed.num_processes": "nnodes num_machines",
        "distributed.process_id": "machine_rank node_rank",
        "logging.profile_steps": "profiler",
        "logging.tensorboard": "use_tensorboard",
        "logging.wandb": "metric_logger report_to use_wandb wandb_project",
        "memory.moments_on_host": "offload_optimizer optimizer_cpu_offload",
        "memory.parameters_on_host": "fsdp_cpu_offload",
        "memory.remat": (
            "activation_checkpointing activation_offloading disable_gradient_checkpointing "
            "enable_activation_checkpointing enable_activation_offloading gradient_checkpointing "
            "gradient_checkpointing_kwargs recompute_activations recompute_granularity "
            "recompute_method recompute_num_layers remat_policy"
        ),
        "mesh.data": (
            "data_parallel_replicate_dim dp_replicate dp_replicate_size ici_data_parallelism"
        ),
        "mesh.expert": "expert_model_parallel_size expert_parallel_size ici_expert_parallelism",
        "mesh.fsdp": (
            "data_parallel_shard_dim deepspeed dp_shard dp_shard_size fsdp_config fsdp_size "
            "ici_fsdp_parallelism zero_stage"
        ),
        "mesh.sequence": (
            "context_parallel_degree context_parallel_dim context_parallel_size cp cp_size "
            "ici_context_parallelism ici_sequence_parallelism ring_size sequence_parallel_degree "
            "sequence_parallel_size sp_degree"
        ),
        "mesh.tensor": (
            "ici_tensor_parallelism tensor_model_parallel_size tensor_parallel_degree "
            "tensor_parallel_dim tensor_parallel_size tp tp_size"
        ),
        "model.compute_dtype": (
            "bf16 bfloat16 bnb_4bit_compute_dtype dtype float16 fp16 mixed_precision precision "
            "torch_dtype"
        ),
        "model.overrides": "rope_scaling rope_theta",
        "model.path": (
            "base_model checkpoint_dir checkpointer hf_model load_parameters_path load_path "
            "model_id model_id_or_path model_name model_name_or_path model_revision pretrained "
            "revision_of_model"
        ),
        "model.tokenizer": "tokenizer_config tokenizer_name_or_path",
        "model.trainable": (
            "freeze_parameters freeze_parameters_regex freeze_trainable_layers "
            "trainable_parameters trainable_parameters_regex unfrozen_parameters"
        ),
        "name": "run_name wandb_name",
        "optimizer.beta1": "adam_b1 adam_beta1",
        "optimizer.beta2": "adam_b2 adam_beta2",
        "optimizer.clip_norm": (
            "clip_grad clip_grad_norm grad_clip gradient_clipping gradient_clipping_threshold "
            "max_grad_norm"
        ),
        "optimizer.epsilon": "adam_eps adam_epsilon",
        "optimizer.final_fraction": (
            "cosine_learning_rate_final_fraction cosine_min_lr_ratio lr_min lr_scheduler_kwargs "
            "min_lr min_lr_rate min_lr_ratio"
        ),
        "optimizer.learning_rate": "lr max_lr peak_lr",
        "optimizer.name": "optim optimizer_type",
        "optimizer.schedule": "lr_decay_style lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optimizer.warmup_fraction": "lr_warmup_fraction warmup_ratio warmup_steps_fraction",
        "optimizer.warmup_steps": "lr_warmup num_warmup_steps warmup warmup_iters",
        "optimizer.weight_dtype": "pure_bf16",
        "preference.beta": "dpo_beta orpo_alpha pref_beta rl_beta",
        "preference.desirable_weight": "kto_chosen_weight kto_desirable_weight",
        "preference.label_smoothing": "dpo_label_smoothing",
        "preference.loss": "dpo_loss_type loss_type pref_loss rl rlhf_type",
        "preference.sft_weight": "cpo_alpha pref_ftx rpo_alpha",
        "preference.undesirable_weight": "kto_rejected_weight kto_undesirable_weight",
        "run_dir": "base_output_directory logdir logging_dir out_dir output_dir save_dir",
        "samples.prompts": "generate_during_eval",
        "train.accumulation": (
            "accumulate_grad_batches grad_accum gradient_accumulation gradient_accumulation_steps"
        ),
        "train.batch_size": (
            "batch bs global_batch_size micro_batch_size per_device_batch_size "
            "per_device_train_batch_size"
        ),
        "train.epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
        "train.evaluate_every": (
            "do_eval eval_every eval_interval eval_steps eval_strategy evals_per_epoch "
            "evaluation_strategy run_val_every_n_steps"
        ),
        "train.log_every": (
            "log_every_n_steps log_freq log_interval log_period logging_steps logging_strategy"
        ),
        "train.steps": (
            "iters learning_rate_schedule_steps max_iters max_steps max_steps_per_epoch num_steps "
            "total_steps train_iters"
        ),
    }
)

# Their name -> what follows our field's name in a hint.
REMARKS = _by_name(
    {
        ", a share of the peak": "cosine_min_lr_ratio lr_min lr_scheduler_kwargs min_lr",
        ", the devices that share a model's state": "deepspeed fsdp_config zero_stage",
        ", such as {enable_thinking: false}": "enable_thinking",
        ", a number of steps": (
            "do_eval eval_strategy evals_per_epoch evaluation_strategy logging_strategy "
            "save_every_n_epochs save_strategy saves_per_epoch"
        ),
        ", with which 0 trains all weights": "finetuning_type train_type tuner_type use_peft",
        ", the whole run's": "max_steps_per_epoch",
        " bfloat16": "bf16 bfloat16 pure_bf16",
        " offload": "activation_offloading enable_activation_offloading",
        ", as org/name@revision": "model_revision revision_of_model",
        ", the parts in which train.batch_size is computed": (
            "accumulate_grad_batches grad_accum gradient_accumulation gradient_accumulation_steps"
        ),
        " nf4, if true": "load_in_4bit",
        " int8, if true": "load_in_8bit",
        " all-linear, the default": "lora_target_linear",
        " last, if true": "mask_history",
        ", rows of a step over all devices and microbatches": (
            "batch_size micro_batch_size per_device_batch_size per_device_train_batch_size"
        ),
        " nf4, or int8": "quant_bits quantization_bit",
        ", a project's name, or logging.tensorboard": "metric_logger report_to",
        " everything, if true": "train_on_input train_on_inputs train_on_prompt",
        " all, last or everything": "loss_scale roles_to_train",
        " all, the default": "train_on_responses_only",
        ", a share": "val_set_size",
    }
)

# Their name -> why we have no such field.
NO_FIELD = _by_name(
    {
        "the same command continues its run": (
            "auto_resume_from_checkpoints recipe_checkpoint resume_from_checkpoint"
        ),
        "the path names the split's file or folder": (
            "dataset_split dataset_test_split dataset_train_split split train_split"
        ),
        "train.py trains": "do_train finetune",
        "a system text is a record's own": (
            "default_system default_system_message new_system_prompt system"
        ),
        "held-out losses are measured with train.batch_size": (
            "batch_size_val eval_batch_size per_device_eval_batch_size"
        ),
        "a held-out loss is also measured before the first step": "eval_delay eval_on_start",
        "rows are always packed with documents": (
            "eval_packing eval_sample_packing group_by_length neat_packing packed packing "
            "packing_strategy pad_to_multiple_of pad_to_sequence_len padding_free sample_packing "
            "train_sampling_strategy"
        ),
        "long conversations are split between turns; preference.long_pairs is for pairs": (
            "excess_length_strategy truncation_mode truncation_strategy"
        ),
        "preference.long_pairs says what happens to a pair longer than data.context_length": (
            "max_completion_length max_prompt_length"
        ),
        "a source's fields maps names in its records, such as {dialog: messages}": (
            "column_map columns dataset_text_field field_messages message_field_content "
            "message_field_role message_property_mappings"
        ),
        "records are recognized; a source's format says how its files are read": "ds_type",
        "a source has a weight": ("interleave_prob interleave_probs mix_strategy mixing_strategy"),
        "all data is prepared once, before the first step, and kept in data.prepared": (
            "buffer_size lazy_tokenize load_from_cache_file overwrite_cache skip_prepare_dataset "
            "streaming"
        ),
        "data is prepared by as many processes as there are cores": (
            "dataset_num_proc dataset_processes preprocessing_num_workers"
        ),
        "rows are built in the background": (
            "dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
            "dataloader_prefetch_factor"
        ),
        "unread fields of records are counted in the report": "remove_unused_columns",
        "rows are always shuffled, by data.seed": (
            "dataset_shuffle shuffle shuffle_dataset shuffle_merged_datasets"
        ),
        "data.clean.duplicates, true by default, drops duplicates": "dataset_exact_deduplication",
        "scripts.push_to_hub uploads an exported model": (
            "hub_model_id hub_private_repo hub_strategy push_to_hub"
        ),
        "a name such as org/name is the Hugging Face hub's": "use_hf",
        "scripts.export_hf --merge writes the merged model": "merge_lora",
        "there is no label smoothing for fine-tuning": "label_smoothing_factor",
        "there is no LoRA+": "lora_plus_lr_ratio lorap_lr_ratio loraplus_lr_ratio",
        "adapter.quantize nf4 also quantizes the scales": (
            "bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant"
        ),
        "A and B begin as in PEFT by default": (
            "init_lora_weights init_weights peft_init_lora_weights"
        ),
        "a new adapter has the same rank and alpha in all layers": (
            "alpha_pattern layers_to_transform rank_pattern"
        ),
        "in preference tuning nothing is dropped unless adapter.dropout is set": "disable_dropout",
        "preference.loss is one loss, to which preference.sft_weight adds a cross-entropy": (
            "loss_weights pref_bco_weight"
        ),
        "docs/preference.md lists what is not supported": (
            "discopop_tau dpo_use_weighting f_alpha_divergence_coef f_divergence_type ld_alpha "
            "use_weighting"
        ),
        "preference.loss orpo and simpo have no reference": "reference_free",
        "preference.ref_model is a whole model; scripts.export_hf --merge makes one": (
            "ref_adapter_name ref_adapters ref_model_adapters"
        ),
        "its entries are fields here, such as model.compute_dtype": (
            "model_init_kwargs ref_model_init_kwargs"
        ),
        "a reference's log-likelihoods are always computed once, before the first step": (
            "precompute_ref_batch_size precompute_ref_log_probs"
        ),
        "the reference does not follow the model": (
            "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model"
        ),
        "a source's weight, such as 0.1, takes a share of it in each epoch": "max_samples",
        "the model's config.json names it": "model_type",
        "the model's config.json says it": (
            "is_encoder_decoder moe_aux_loss_coeff router_aux_loss_coef"
        ),
        "there is no NEFTune": "neftune_alpha neftune_noise_alpha noisy_embedding_alpha",
        "another run_dir begins another run; none is overwritten": (
            "add_version overwrite_output_dir"
        ),
        "scripts.export_hf writes the model without the optimizer's state": (
            "no_save_optim save_adapter_weights_only save_only_model"
        ),
        "exports are safetensors": ("safe_serialization save_safetensors"),
        "they are the tokenizer's, as its files name them": "eos_token pad_token special_tokens",
        "padding is never trained on": "label_pad_token_id padding_value",
        "stages is a curriculum; preferences are sources with format: preference": "stage",
        "the tokenizer's files say it": "tokenizer_type",
        "the token that ends a trained answer is trained on": (
            "eot_tokens train_on_eos train_on_eot"
        ),
        "no code from a model's repository runs": "external_plugins plugins trust_remote_code",
        "JAX compiles every step, and chooses its kernels": (
            "compile cut_cross_entropy enable_liger_kernel fused liger_fused_linear_cross_entropy "
            "liger_glu_activation liger_layer_norm liger_rms_norm liger_rope lora_mlp_kernel "
            "lora_o_kernel lora_qkv_kernel tf32 torch_compile use_kernels use_liger_kernel"
        ),
        "JAX uses the devices that it finds; mesh says how": (
            "accelerator_config ddp_backend ddp_find_unused_parameters ddp_timeout device "
            "device_map fsdp_version local_rank nproc_per_node parallelism_config"
        ),
        "there is no pipeline parallelism": "pipeline_model_parallel_size",
        "metrics.jsonl has every metric; eval.report draws them": (
            "include_num_input_tokens_seen log_peak_memory_stats logging_first_step plot_loss"
        ),
        "the package wandb reads it from its environment, such as WANDB_ENTITY": (
            "wandb_entity wandb_log_model wandb_mode wandb_run_id wandb_watch"
        ),
        "metrics go to TensorBoard, Weights & Biases and metrics.jsonl": (
            "swanlab_project trackio_project_name use_mlflow use_swanlab"
        ),
        "text alone is trained on": (
            "freeze_aligner freeze_llm freeze_mm_modules freeze_multi_modal_projector freeze_vit "
            "freeze_vision_tower image_max_pixels max_pixels processor_type video_max_pixels"
        ),
        "optimizer.name chooses one of ours": "optim_args optim_target_modules",
        "a recipe names no code": "_component_",
        "train.non_finite says what follows a loss that is not finite": (
            "loss_watchdog_patience loss_watchdog_threshold"
        ),
        "unknown fields are always refused": "strict",
    }
)

# Our field -> their name of a value -> ours.
MEANT_VALUES = {
    "adapter.quantize": _by_name({"nf4": "4 4bit bitsandbytes bnb fp4", "int8": "8 8bit"}),
    "attention.kernel": _by_name(
        {"auto": "eager flash_attention_2 flash_attention_3 flash_attn flex_attention fa2 sdpa"}
    ),
    "memory.remat": _by_name(
        {"save_attention, or nothing to save memory": "True true full selective"}
    ),
    "model.compute_dtype": _by_name({"bfloat16": "auto bf16 float16 fp16", "float32": "fp32"}),
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
