"""GRPO as your own script: the whole training loop is in this file.

    python -m megarl.launcher.local examples/gsm8k_grpo.py \
        --config configs/script_grpo.yaml --nproc 2 train_dataset.path=openai/gsm8k

The launcher starts the generation servers and one process of this script for each trainer. Beside
servers of your own, run `torchrun --nproc-per-node 2 examples/gsm8k_grpo.py --config ...`. Every
rank runs the whole script: rank 0 talks to the servers, and the engine distributes the batches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torchdata.stateful_dataloader import StatefulDataLoader

from megarl import (
    FinetuneSpec,
    GRPOConfig,
    MegatronActor,
    MegatronRef,
    RemoteSGLangEngine,
    RLVRWorkflow,
    Saver,
    StatsLogger,
    WeightUpdateMeta,
    arg,
    build_dataset,
    get_reward_fn,
    load_expr_config,
    load_hf_tokenizer,
    stats_tracker,
)  # fmt: skip


@dataclass(kw_only=True)
class ScriptConfig(GRPOConfig):
    transfer: str = arg("megatron", help="how weights travel", choices=("megatron", "disk"))


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, ScriptConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path or config.actor.path)
    data = config.train_dataset
    rows = build_dataset(data, tokenizer, purpose="rl", seed=config.seed)
    dataloader = StatefulDataLoader(
        rows, batch_size=data.batch_size, shuffle=data.shuffle, drop_last=True, collate_fn=list
    )
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(rows),
        train_batch_size=data.batch_size,
        max_steps=config.total_train_steps,
    )

    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    actor = MegatronActor(config.actor, temperature=config.gconfig.temperature)
    actor.initialize(None, ft_spec)
    ref = None
    if config.actor.kl_coef > 0 and config.ref is not None:
        ref = MegatronRef(config.ref, temperature=config.gconfig.temperature)
        ref.initialize(None, ft_spec)
    if config.transfer == "disk":
        meta = WeightUpdateMeta.from_disk(config, addresses=rollout.addresses)
    else:
        meta = WeightUpdateMeta.from_megatron(addresses=rollout.addresses)

    reward_fn = get_reward_fn(data.reward.type or data.type)
    workflow = RLVRWorkflow(reward_fn=reward_fn, gconfig=config.gconfig, tokenizer=tokenizer)
    saver = Saver.for_run(config, actor)
    logger = StatsLogger.for_run(config)

    # --8<-- [start:loop]
    for global_step in range(ft_spec.total_train_steps):
        epoch, step = divmod(global_step, ft_spec.steps_per_epoch)
        with stats_tracker.record_timing("rollout"):
            batch = rollout.prepare_batch(dataloader, workflow=workflow)
        with stats_tracker.record_timing("train_step"):
            batch["prox_logp"] = actor.compute_logp(batch)
            if ref is not None:
                batch["ref_logp"] = ref.compute_logp(batch)
            actor.compute_advantages(batch)
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()
        with stats_tracker.record_timing("update_weights"):
            rollout.pause()
            future = rollout.update_weights(meta)
            actor.upload_weights(meta)
            future.result()
            rollout.resume()
            actor.set_version(global_step + 1)
            rollout.set_version(global_step + 1)
        saver.maybe_save(**ft_spec.where(global_step + 1))
        stats_tracker.scalar(**stats, reward=batch["rewards"].mean())
        logger.commit(epoch, step, global_step, stats_tracker.export())
    # --8<-- [end:loop]

    saver.save_final()
    logger.close()
    rollout.destroy()
    actor.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
