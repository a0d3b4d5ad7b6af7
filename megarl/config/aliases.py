"""Knows our keys by their names in TRL, verl, AReaL, slime, NeMo-RL and Megatron-LM.

`aliased` answers an unknown key that is one of their names with ours. An alias stands for the end
of a dotted name (`rollout.n` for `actor_rollout_ref.rollout.n`); the longest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

ROLES = ("actor", "model")  # the trained model of a recipe: the first it has
_SAME_ROLE = {"policy": "actor", "reference": "ref", "ref_model": "ref", "value_model": "critic"}

_MEMORY = "server.options.mem_fraction_static=0.8"
# our key -> their names for it; `*` is the role that the name mentions, else the trained one;
# `=...` is a value to give the key; behind a dot the last part of their name comes
_THEIRS: Mapping[str, str] = {
    # models
    "*.path": "model_path model_name model_name_or_path model.path hf_checkpoint pretrain",
    "ref.path": "ref_load ref_model_path",
    "reward_model.path": "reward_model_path",
    "tokenizer_path": "tokenizer tokenizer_name tokenizer_name_or_path",
    "*.dtype=bfloat16": "bf16",
    "*.dtype=float16": "fp16",
    "*.dtype": "torch_dtype precision",
    "*.attention": "attn_implementation",
    "*.recompute_granularity=full": "gradient_checkpointing enable_gradient_checkpointing "
    "activation_checkpointing",
    "*.lora.r": "use_peft lora_rank lora_r",
    "*.lora.alpha": "lora_alpha",
    "*.lora.target_modules": "lora_target_modules",
    # the optimizer
    "*.optimizer.lr": "learning_rate lr",
    "*.optimizer.gradient_clipping": "grad_clip clip_grad max_grad_norm",
    "*.optimizer.warmup_steps": "warmup_ratio lr_warmup_steps_ratio num_warmup_steps "
    "lr_warmup_steps warmup_steps_proportion",
    "*.optimizer.lr_scheduler_type": "lr_scheduler scheduler lr_decay_style warmup_style",
    "*.optimizer.min_lr_ratio": "min_lr",
    "*.optimizer.beta1": "adam_beta1",
    "*.optimizer.beta2": "adam_beta2",
    "*.optimizer.eps": "adam_eps adam_epsilon",
    "*.optimizer.": "optim.weight_decay optim.lr_scheduler_type optim.min_lr_ratio",
    "*.override_config": "override_model_config",
    "*.optimizer.options.use_precision_aware_optimizer": "precision_aware",
    "*.optimizer.options.hysteresis": "loss_scale_hysteresis hysteresis",
    "*.options.moe_aux_loss_coeff": "moe.aux_loss_coef moe_aux_loss_coeff aux_loss_coef",
    "*.options.moe_z_loss_coeff": "moe.z_loss_coef moe_z_loss_coeff",
    "*.options.moe_router_bias_update_rate": "moe.expert_bias_update_rate "
    "moe_router_bias_update_rate",
    "*.options.moe_token_dispatcher_type": "moe.token_dispatcher moe_token_dispatcher_type",
    "*.options.load_per_layer": "moe.per_layer_stats",
    "*.router_replay": "moe.router_replay router_replay.mode",
    "*.optimizer.distributed": "use_distributed_optimizer",
    "*.optimizer.options.optimizer_cpu_offload": "cpu_offload optimizer_offload",
    "*.optimizer.options.optimizer_offload_fraction": "cpu_offload_fraction",
    # options by their own names
    "*.options.": "cp_comm_type recompute_method recompute_num_layers offload_activations "
    "lm_head_chunk_tokens lm_head_keep_mb value_head_init recompute_modules",
    "*.optimizer.options.": "exp_avg_dtype exp_avg_sq_dtype main_params_dtype initial_loss_scale "
    "min_loss_scale loss_scale_window use_precision_aware_optimizer optimizer_cpu_offload "
    "optimizer_offload_fraction",
    "weight_sync.options.": "weight_sync.delta weight_sync.sharded weight_sync.quantization",
    "preference.options.": "preference.beta preference.gamma preference.length_normalized "
    "preference.sft_coef",
    # the loss
    "actor.kl_coef": "kl_ctl kl_loss_coef kl_beta init_kl_coef beta reference_policy_kl_penalty",
    "actor.kl_estimator": "kl_loss_type kl_penalty",
    "actor.kl_controller={target: 0.1, horizon: 10000}": "kl_ctrl.type",
    "kl_ctl": "kl_ctrl.kl_coef",
    "actor.eps_clip": "clip_ratio cliprange epsilon clip_range clip_ratio_low ratio_clip_min",
    "actor.eps_clip_higher": "eps_clip_high clip_ratio_high ratio_clip_max epsilon_high",
    "actor.c_clip": "clip_ratio_c eps_clip_c",
    "actor.entropy_coef": "entropy_coeff",
    "actor.loss_agg": "loss_agg_mode",
    "actor.adv_norm": "adv_estimator advantage_estimator scale_rewards group_reward_norm "
    "norm_adv_by_std_in_grpo normalize_advantages",
    "actor.advantages.options.kind": "adv_std",
    "actor.dynamic_sampling": "filter_groups use_dynamic_sampling",
    "actor.ppo_n_minibatches": "ppo_mini_batch_size",
    "*.ppo_n_minibatches": "num_mini_batches",
    "critic.value_clip": "cliprange_value value_eps_clip",
    "discount": "gamma",
    "gae.length_alpha": "gae_length_alpha",
    "gae.critic_lambda": "gae_lambda_critic",
    "gae.bootstrap": "bootstrap_truncated",
    "gae_lambda": "lam lambd",
    # micro-batches and layout
    "*.mb_spec.max_tokens_per_mb": "gradient_accumulation_steps micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "*.parallel.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "*.parallel.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "*.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "*.parallel.cp": "context_parallel_size cp_size ulysses_sequence_parallel_size",
    "*.parallel.ep": "expert_parallel_size expert_model_parallel_size ep_size",
    "*.parallel.etp": "expert_tensor_parallel_size",
    # data
    "train_dataset.batch_size": "train_batch_size batch_size global_batch_size "
    "per_device_train_batch_size rollout_batch_size num_prompts_per_step",
    "train_dataset.max_length": "max_prompt_length max_prompt_len",
    "train_dataset.path": "prompt_data dataset_name dataset_path",
    "train_dataset.files": "train_files",
    "train_dataset.parts": "datasets data_mixture blend",
    "valid_dataset.path": "eval_dataset",
    "valid_dataset.files": "val_files",
    "valid_dataset.size": "val_batch_size evaluator.max_samples",
    "train_dataset.size": "max_train_samples train_max_samples",
    "train_dataset.reward": "reward_fn reward_funcs custom_reward_function.path rm_type "
    "custom_rm_path",
    # generation
    "gconfig.n_samples": "rollout.n group_size num_generations n_samples_per_prompt "
    "num_generations_per_prompt",
    "gconfig.max_new_tokens": "max_tokens max_response_length response_length "
    "max_completion_length rollout_max_response_len",
    "gconfig.temperature": "rollout_temperature",
    "gconfig.": "rollout.temperature rollout.top_p rollout.top_k",
    "gconfig.greedy": "do_sample",
    "gconfig.stop": "stop_strings",
    "server.context_length": "max_model_len max_seq_len max_seq_length context_len",
    "server.max_running_requests": "max_num_seqs",
    "server.release_memory": "free_cache_engine hybrid_engine offload_rollout colocate",
    "server.options.disable_cuda_graph=true": "enforce_eager disable_cuda_graph",
    "server.options": "extra_args",
    "server.tp": "rollout.tensor_parallel_size vllm_tensor_parallel_size "
    "rollout.tensor_model_parallel_size rollout_num_gpus_per_engine",
    "server.dp": "rollout.data_parallel_size",
    "cluster.sbatch_args": "slurm.sbatch_args cluster.slurm",
    "cluster.n_nodes": "trainer.nnodes cluster.num_nodes actor_num_nodes",
    "cluster.n_gpus_per_node": "trainer.n_gpus_per_node cluster.gpus_per_node",
    _MEMORY: "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static "
    "sglang_mem_fraction_static",
    "server.type": "rollout.name",
    "rollout": "inf_engine",
    "rollout.workflow": "multi_turn.enable",
    "rollout.workflow.options": "multi_turn.max_turns multi_turn.max_user_turns "
    "multi_turn.max_assistant_turns multi_turn.tool_config_path tool_kwargs.tools_config_file",
    "rollout.max_head_offpolicyness": "async_training max_staleness staleness_threshold "
    "max_trajectory_age_steps",
    "rollout.request_timeout": "request_retries retry_timeout teacher.request_timeout",
    "rollout.setup_timeout": "start_timeout",
    "collective_timeout": "meeting_timeout rendezvous_timeout",
    "weight_sync.type": "weight_update_mode",
    # the run
    "total_train_epochs": "num_epochs num_train_epochs total_epochs num_epoch max_num_epochs "
    "epochs",
    "total_train_steps": "max_steps total_training_steps max_num_steps num_rollout total_steps "
    "train_steps",
    "fileroot": "output_dir save_dir default_local_dir checkpoint_dir",
    "trial_name": "run_name trainer.experiment_name",
    "experiment_name": "project_name exp_name",
    "saver.freq_steps": "save_steps save_freq save_interval save_period",
    "saver.keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "recover.mode": "resume_mode resume_from_checkpoint",
    "evaluator.freq_steps": "eval_steps test_freq eval_interval val_period",
    "evaluator.at_start": "val_before_train val_at_start",
    "stats_logger.wandb.mode": "report_to use_wandb",
    "stats_logger.wandb.options": "wandb_project wandb_entity",
}
ALIASES = {
    name: ours + name.rpartition(".")[2] if ours.endswith(".") else ours
    for ours, theirs in _THEIRS.items()
    for name in theirs.split()
}
# of supervised fine-tuning, where the names above mean something else or nothing
_LENGTHS = "max_seq_len max_seq_length max_model_len max_length"
_SFT = dict.fromkeys(_LENGTHS.split(), "train_dataset.max_length")
_SFT["dataset"] = "train_dataset.path"
# their sections whose keys are those of one of our free dicts
_SECTIONS = {
    "sglang": "server.options",
    "server.extra_args": "server.options",
    "rollout.workflow": "rollout.workflow.options",
}
# their keys for which we need none -> what to do
_SBATCH = "write it among cluster.sbatch_args, and of another pool among its own sbatch_args"
NEEDLESS = {
    "partition": f"{_SBATCH}: --partition=NAME",
    "account": f"{_SBATCH}: --account=NAME",
    "reservation": f"{_SBATCH}: --reservation=NAME",
    "exclusive": f"{_SBATCH}: --exclusive, --oversubscribe or --mem=... say how nodes are shared",
    "srun_args": "set variables of srun's (SLURM_..., see man srun) in cluster.sbatch_args "
    "by --export, or in the environment",
    "slurm.minutes": f"{_SBATCH}: --time=MINUTES",
    "slurm.save_before": f"{_SBATCH}: --signal=B:USR1@SECONDS",
    "slurm.requeue": f"{_SBATCH}: --no-requeue",
    "optimizer.type": "leave it out: the optimizer is Adam",
    "saver.mode": "write saver.metric=-NAME where a smaller one is better",
    "poll_seconds": "leave it out: the launcher asks Slurm every 2 s",
    "value_head_bias": "leave it out: a reward model's head has no bias, a critic's has one",
    "delta_on_host": "leave it out: the copy is in host memory",
    "weight_sync.senders": "leave it out: one rank gathers and sends",
    "weight_sync.flattened": "leave it out: a bucket goes as one broadcast",
    "max_queue": "set rollout.max_concurrent_rollouts, the number of episodes in flight; servers "
    "queue what is more than they can run",
    "return_raw_chat": "leave it out: a row keeps its messages",
    "rollout.router": "leave it out: the client sends an episode's requests to one server, and "
    "others to the least loaded (rollout.affinity)",
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
            key = ours.partition("=")[0]
            if key in keys or getattr(keys.get(key.rpartition(".")[0]), "free_form", False):
                return ours
    for theirs, free in _SECTIONS.items():
        rest = name.removeprefix(theirs + ".")
        misspelt = get_close_matches(rest.partition(".")[0], ("type", "options"))
        own = f"{free.rpartition('.')[0]}.{rest}"
        if rest != name and free in keys and not misspelt:
            return own if own in keys else f"{free}.{rest}"
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
