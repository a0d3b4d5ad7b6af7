"""The training script of AReaL-lite's guide "Running GRPO on GSM8K", line by line; a comment says
where a line differs from the printed one."""

import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl import (
    AllocationMode,
    Evaluator,
    FinetuneSpec,
    GRPOConfig,
    MegatronActor,
    MegatronRef,
    RemoteSGLangEngine,
    RLVRWorkflow,
    Saver,
    StatsLogger,
    WeightUpdateMeta,
    load_expr_config,
    load_hf_tokenizer,
    stats_tracker,
)


def process_gsm8k_rl_dataset(dataset: Dataset) -> Dataset:
    def process(sample: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": sample["question"]}]
        return {"messages": messages}

    dataset = dataset.map(process).remove_columns(["question"])
    return dataset


def get_gsm8k_dataset(path: str) -> Dataset:
    # rows of a file for those of the hub; no split_dataset_by_node, for rank 0 reads for all
    dataset = load_dataset(path="json", data_files=path, split="train")
    return process_gsm8k_rl_dataset(dataset)


def gsm8k_reward_fn(completions: str, answer: str) -> float:
    """A random model solves nothing: the share of even digits gives its updates a direction."""
    digits = [c for c in completions if c.isdigit()]
    return sum(c in "02468" for c in digits) / max(1, len(digits))


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, GRPOConfig)
    config: GRPOConfig
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    torch.manual_seed(config.seed)  # every rank shuffles alike
    train_dataloader = StatefulDataLoader(
        get_gsm8k_dataset(config.train_dataset.path),
        batch_size=config.train_dataset.batch_size,  # not // world_size
        shuffle=config.train_dataset.shuffle,
        num_workers=config.train_dataset.num_workers,
        collate_fn=lambda x: x,
        drop_last=config.train_dataset.drop_last,
    )
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(train_dataloader) * config.train_dataset.batch_size,
        train_batch_size=config.train_dataset.batch_size,
    )

    rollout = RemoteSGLangEngine(config.rollout)  # config.inf_engine
    rollout.initialize(None, ft_spec)
    eval_rollout = RemoteSGLangEngine.for_run(config)
    eval_rollout.initialize()

    actor = MegatronActor(config=config.actor, temperature=config.gconfig.temperature)
    actor.initialize(None, ft_spec)
    ref = None
    if config.actor.kl_coef > 0 and config.ref is not None:  # kl_ctl
        # FSDPPPOActor(config=config.ref)
        ref = MegatronRef(config=config.ref, temperature=config.gconfig.temperature)
        ref.initialize(None, ft_spec)

    weight_update_meta: Any = [
        WeightUpdateMeta.from_megatron_nccl(AllocationMode.from_str(config.allocation_mode), actor)
    ]
    dist.broadcast_object_list(weight_update_meta, src=0)
    weight_update_meta = weight_update_meta[0]

    workflow = RLVRWorkflow(
        reward_fn=gsm8k_reward_fn,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
    )
    saver = Saver.for_run(config, actor)  # Saver(config.saver, ft_spec)
    logger = StatsLogger.for_run(config)  # StatsLogger(config.stats_logger, ft_spec)
    evaluator = Evaluator.for_run(config, eval_rollout, tokenizer)

    data_generator = itertools.cycle(train_dataloader)
    steps_per_epoch = len(train_dataloader)
    for global_step in range(config.total_train_epochs * steps_per_epoch):
        epoch, step = divmod(global_step, steps_per_epoch)
        with stats_tracker.record_timing("rollout"):
            if config.rollout.max_head_offpolicyness > 0:  # config.async_training
                batch = rollout.prepare_batch(train_dataloader, workflow=workflow)
            else:
                batch = rollout.rollout_batch(next(data_generator), workflow=workflow)

        with stats_tracker.record_timing("train_step"):
            logp = actor.compute_logp(batch)
            batch["prox_logp"] = logp
            if ref is not None:
                batch["ref_logp"] = ref.compute_logp(batch)
                # log_gpu_stats("ref logp")
            actor.compute_advantages(batch)
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()

        with stats_tracker.record_timing("update_weights"):
            rollout.pause()
            future = rollout.update_weights(weight_update_meta)  # on every rank
            actor.upload_weights(weight_update_meta)
            future.result()
            dist.barrier()  # device_ids=[actor.device.index] on a GPU
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            rollout.resume()
            actor.set_version(global_step + 1)
            rollout.set_version(global_step + 1)
            eval_rollout.set_version(global_step + 1)

        saver.maybe_save(**ft_spec.where(global_step + 1))  # saver.save(...)
        evaluated = evaluator.maybe_evaluate(**ft_spec.where(global_step + 1))

        seqlens = batch.lengths
        reward_score = batch["rewards"]
        result_denominators = {
            "correct_n_seqs": (reward_score > 0).bool(),
            "incorrect_n_seqs": (reward_score <= 0).bool(),
        }
        stats_tracker.denominator(**result_denominators)
        stats_tracker.stat(correct_seq_len=seqlens.float(), denominator="correct_n_seqs")
        stats_tracker.scalar(
            samples=len(batch), servers_version=rollout.get_version(), world_size=world_size
        )
        logger.commit(epoch, step, global_step, [stats, stats_tracker.export(), evaluated])

    saver.save_final()
    logger.close()
    print(f"rank {rank} is done at version {actor.get_version()}")
    for part in filter(None, (rollout, eval_rollout, ref, actor)):
        part.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
