"""Knows our keys by their names in TRL, verl, AReaL, slime, NeMo-RL and Megatron-LM.

`aliased` answers an unknown key that is one of their names with ours. An alias stands for the end
of a dotted name (`rollout.n` for `actor_rollout_ref.rollout.n`); the longest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping

ROLES = ("actor", "model")  # the trained model of a recipe: the first it has
_SAME_ROLE = {"policy": "actor", "reference": "ref", "ref_model": "ref", "value_model": "critic"}

# `*` is the role that the name mentions, else the trained one; `=...` a value to give the key
ALIASES: Mapping[str, str] = {
    # models
    "model_path": "*.path", "model_name": "*.path", "model_name_or_path": "*.path",
    "model.path": "*.path", "hf_checkpoint": "*.path", "pretrain": "*.path",
    "ref_load": "ref.path", "ref_model_path": "ref.path", "reward_model_path": "reward_model.path",
    "tokenizer": "tokenizer_path", "tokenizer_name": "tokenizer_path",
    "tokenizer_name_or_path": "tokenizer_path",
    "bf16": "*.dtype=bfloat16", "fp16": "*.dtype=float16", "torch_dtype": "*.dtype",
    "precision": "*.dtype", "attn_implementation": "*.attention",
    "gradient_checkpointing": "*.recompute_granularity=full",
    "enable_gradient_checkpointing": "*.recompute_granularity=full",
    "activation_checkpointing": "*.recompute_granularity=full",
    "use_peft": "*.lora.r", "lora_rank": "*.lora.r", "lora_r": "*.lora.r",
    "lora_alpha": "*.lora.alpha", "lora_target_modules": "*.lora.target_modules",
    # the optimizer
    "learning_rate": "*.optimizer.lr", "lr": "*.optimizer.lr",
    "grad_clip": "*.optimizer.gradient_clipping", "clip_grad": "*.optimizer.gradient_clipping",
    "max_grad_norm": "*.optimizer.gradient_clipping",
    "warmup_ratio": "*.optimizer.warmup_steps_proportion",
    "num_warmup_steps": "*.optimizer.warmup_steps",
    "lr_warmup_steps": "*.optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "*.optimizer.warmup_steps_proportion",
    "lr_scheduler": "*.optimizer.lr_scheduler_type", "scheduler": "*.optimizer.lr_scheduler_type",
    "lr_decay_style": "*.optimizer.lr_scheduler_type", "min_lr": "*.optimizer.min_lr_ratio",
    "adam_beta1": "*.optimizer.beta1", "adam_beta2": "*.optimizer.beta2",
    "adam_eps": "*.optimizer.eps", "adam_epsilon": "*.optimizer.eps",
    "override_model_config": "*.override_config",
    "use_distributed_optimizer": "*.optimizer.distributed",
    "optimizer_cpu_offload": "*.optimizer.cpu_offload",
    "optimizer_offload": "*.optimizer.cpu_offload",
    # the loss
    "kl_ctl": "actor.kl_coef", "kl_loss_coef": "actor.kl_coef", "kl_beta": "actor.kl_coef",
    "init_kl_coef": "actor.kl_coef", "beta": "actor.kl_coef",
    "reference_policy_kl_penalty": "actor.kl_coef",
    "kl_loss_type": "actor.kl_estimator", "kl_penalty": "actor.kl_estimator",
    "clip_ratio": "actor.eps_clip", "cliprange": "actor.eps_clip", "epsilon": "actor.eps_clip",
    "clip_range": "actor.eps_clip", "clip_ratio_low": "actor.eps_clip",
    "ratio_clip_min": "actor.eps_clip", "eps_clip_high": "actor.eps_clip_higher",
    "clip_ratio_high": "actor.eps_clip_higher", "ratio_clip_max": "actor.eps_clip_higher",
    "epsilon_high": "actor.eps_clip_higher", "clip_ratio_c": "actor.c_clip",
    "loss_agg_mode": "actor.loss_agg", "adv_estimator": "actor.adv_norm",
    "advantage_estimator": "actor.adv_norm", "scale_rewards": "actor.adv_norm",
    "group_reward_norm": "actor.adv_norm", "norm_adv_by_std_in_grpo": "actor.adv_norm",
    "normalize_advantages": "actor.adv_norm", "filter_groups": "actor.dynamic_sampling",
    "use_dynamic_sampling": "actor.dynamic_sampling",
    "ppo_mini_batch_size": "actor.ppo_n_minibatches", "num_mini_batches": "*.ppo_n_minibatches",
    "cliprange_value": "critic.value_clip", "value_eps_clip": "critic.value_clip",
    "gamma": "discount", "lam": "gae_lambda", "lambd": "gae_lambda",
    # micro-batches and layout
    "gradient_accumulation_steps": "*.mb_spec.max_tokens_per_mb",
    "micro_batch_size": "*.mb_spec.max_tokens_per_mb",
    "ppo_micro_batch_size_per_gpu": "*.mb_spec.max_tokens_per_mb",
    "ppo_max_token_len_per_gpu": "*.mb_spec.max_tokens_per_mb",
    "max_tokens_per_gpu": "*.mb_spec.max_tokens_per_mb",
    "tensor_parallel_size": "*.parallel.tp", "tensor_model_parallel_size": "*.parallel.tp",
    "tp_size": "*.parallel.tp", "pipeline_parallel_size": "*.parallel.pp",
    "pipeline_model_parallel_size": "*.parallel.pp", "pp_size": "*.parallel.pp",
    "virtual_pipeline_model_parallel_size": "*.parallel.vpp",
    "context_parallel_size": "*.parallel.cp", "cp_size": "*.parallel.cp",
    "expert_parallel_size": "*.parallel.ep", "expert_model_parallel_size": "*.parallel.ep",
    "ep_size": "*.parallel.ep", "expert_tensor_parallel_size": "*.parallel.etp",
    # data
    "train_batch_size": "train_dataset.batch_size", "batch_size": "train_dataset.batch_size",
    "global_batch_size": "train_dataset.batch_size",
    "per_device_train_batch_size": "train_dataset.batch_size",
    "rollout_batch_size": "train_dataset.batch_size",
    "num_prompts_per_step": "train_dataset.batch_size",
    "max_prompt_length": "train_dataset.max_length", "max_prompt_len": "train_dataset.max_length",
    "train_files": "train_dataset.path", "prompt_data": "train_dataset.path",
    "dataset_name": "train_dataset.path", "dataset_path": "train_dataset.path",
    "val_files": "valid_dataset.path", "eval_dataset": "valid_dataset.path",
    "val_batch_size": "evaluator.max_samples",
    "max_train_samples": "train_dataset.size", "train_max_samples": "train_dataset.size",
    "reward_fn": "train_dataset.reward", "reward_funcs": "train_dataset.reward",
    "custom_reward_function.path": "train_dataset.reward", "rm_type": "train_dataset.reward",
    "custom_rm_path": "train_dataset.reward",
    # generation
    "rollout.n": "gconfig.n_samples", "group_size": "gconfig.n_samples",
    "num_generations": "gconfig.n_samples", "n_samples_per_prompt": "gconfig.n_samples",
    "num_generations_per_prompt": "gconfig.n_samples",
    "max_tokens": "gconfig.max_new_tokens", "max_response_length": "gconfig.max_new_tokens",
    "response_length": "gconfig.max_new_tokens",
    "max_completion_length": "gconfig.max_new_tokens",
    "rollout_max_response_len": "gconfig.max_new_tokens",
    "rollout_temperature": "gconfig.temperature", "do_sample": "gconfig.greedy",
    "stop_strings": "gconfig.stop",
    "max_model_len": "server.context_length", "max_seq_len": "server.context_length",
    "max_seq_length": "server.context_length", "context_len": "server.context_length",
    "max_num_seqs": "server.max_running_requests",
    "rollout.tensor_parallel_size": "server.tp", "vllm_tensor_parallel_size": "server.tp",
    "rollout.tensor_model_parallel_size": "server.tp", "rollout_num_gpus_per_engine": "server.tp",
    "gpu_memory_utilization": "server.extra_args=[--mem-fraction-static,'0.8']",
    "vllm_gpu_memory_utilization": "server.extra_args=[--mem-fraction-static,'0.8']",
    "mem_fraction_static": "server.extra_args=[--mem-fraction-static,'0.8']",
    "sglang_mem_fraction_static": "server.extra_args=[--mem-fraction-static,'0.8']",
    "max_staleness": "rollout.max_head_offpolicyness",
    "staleness_threshold": "rollout.max_head_offpolicyness",
    "max_trajectory_age_steps": "rollout.max_head_offpolicyness",
    "weight_update_mode": "weight_sync.type", "weight_sync.owners": "weight_sync.senders",
    # the run
    "num_epochs": "total_train_epochs", "num_train_epochs": "total_train_epochs",
    "total_epochs": "total_train_epochs", "num_epoch": "total_train_epochs",
    "max_num_epochs": "total_train_epochs", "epochs": "total_train_epochs",
    "max_steps": "total_train_steps", "total_training_steps": "total_train_steps",
    "max_num_steps": "total_train_steps", "num_rollout": "total_train_steps",
    "total_steps": "total_train_steps", "train_steps": "total_train_steps",
    "output_dir": "fileroot", "save_dir": "fileroot", "default_local_dir": "fileroot",
    "checkpoint_dir": "fileroot", "run_name": "trial_name",
    "project_name": "experiment_name", "exp_name": "experiment_name",
    "save_steps": "saver.freq_steps", "save_freq": "saver.freq_steps",
    "save_interval": "saver.freq_steps", "save_period": "saver.freq_steps",
    "save_total_limit": "saver.keep_last", "max_actor_ckpt_to_keep": "saver.keep_last",
    "resume_mode": "recover.mode", "resume_from_checkpoint": "recover.mode",
    "eval_steps": "evaluator.freq_steps", "test_freq": "evaluator.freq_steps",
    "eval_interval": "evaluator.freq_steps", "val_period": "evaluator.freq_steps",
    "val_before_train": "evaluator.at_start", "val_at_start": "evaluator.at_start",
    "report_to": "stats_logger.wandb.mode", "use_wandb": "stats_logger.wandb.mode",
    "wandb_project": "stats_logger.wandb.project",
}  # fmt: skip
# of supervised fine-tuning, where the names above mean something else or nothing
_SFT: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_seq_len", "max_seq_length", "max_model_len", "max_length"), "train_dataset.max_length"
    ),
    "dataset": "train_dataset.path",
}


def aliased(keys: Mapping[str, object], name: str) -> str | None:
    """Returns our name for the dotted `name` in a recipe of these `keys`; None for no alias."""
    role = role_of(keys, name)
    table = ALIASES if "gconfig" in keys else {**ALIASES, **_SFT}
    parts = name.split(".")
    for start in range(len(parts)):
        target = table.get(".".join(parts[start:]))
        if target is None:
            continue
        for candidate in dict.fromkeys((role, main_role(keys))):
            ours = target.replace("*", candidate)
            if ours.partition("=")[0] in keys:
                return ours
    return None


def main_role(keys: Mapping[str, object]) -> str:
    """Returns the section of the model that this recipe is about: actor in RL, model in SFT."""
    return next(role for role in ROLES if role in keys)


def role_of(keys: Mapping[str, object], name: str) -> str:
    """Returns the last role that `name` mentions, else the main one."""
    known = (*ROLES, "ref", "critic", "reward_model")
    for part in reversed(name.split(".")[:-1]):
        role = _SAME_ROLE.get(part, part)
        if role in known and role in keys:
            return role
    return main_role(keys)
