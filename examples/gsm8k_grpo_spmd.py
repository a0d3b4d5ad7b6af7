"""GRPO as your own script: the whole training loop is in this file.

    megarl launch examples/gsm8k_grpo_spmd.py --config configs/script_grpo.yaml

The launcher also starts the generation servers; with servers of your own, use torchrun. Every rank
runs the whole script: rank 0 talks to the servers, and the engine distributes the batches.
"""

import sys

import megarl
from megarl import FinetuneSpec, GRPOConfig, WeightUpdateMeta, stats_tracker


def main(args: list[str]) -> None:
    config, _ = megarl.load_expr_config(args, GRPOConfig)
    data, gconfig = config.train_dataset, config.gconfig
    path = config.tokenizer_path or config.actor.path
    tokenizer = megarl.load_hf_tokenizer(path, trust_remote_code=config.trust_remote_code)
    rows = megarl.build_dataset(data, tokenizer, purpose="rl", seed=config.seed)
    dataloader = megarl.build_dataloader(rows, data, seed=config.seed)
    ft_spec = FinetuneSpec.for_run(config, dataset_size=len(rows))

    rollout = megarl.RemoteSGLangEngine.for_run(config)
    rollout.initialize(None, ft_spec)
    actor = megarl.MegatronActor(config.actor, temperature=gconfig.temperature)
    actor.initialize(None, ft_spec)
    ref = None
    if config.actor.kl_coef > 0 and config.ref is not None:
        ref = megarl.MegatronRef(config.ref, temperature=gconfig.temperature)
        ref.initialize(None, ft_spec)
    meta = WeightUpdateMeta.from_config(
        config.weight_sync,
        path=megarl.run_dir(config) / "weights",
        addresses=rollout.addresses,
        flush_cache=config.rollout.kv_after_sync == "flush",
    )
    workflow = megarl.RLVRWorkflow.for_run(config, tokenizer)
    evaluator = megarl.Evaluator.for_run(config, rollout, tokenizer, trained=rows)
    saver, logger = megarl.Saver.for_run(config, actor), megarl.StatsLogger.for_run(config)

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
        evaluated = evaluator.maybe_evaluate(**ft_spec.where(global_step + 1))
        stats_tracker.scalar(**stats, reward=batch["rewards"].mean())
        logger.commit(epoch, step, global_step, [stats_tracker.export(), evaluated])

    saver.save_final()
    logger.close()
    for part in filter(None, (rollout, ref, actor)):
        part.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
