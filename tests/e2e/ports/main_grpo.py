"""The example of AReaL v1.0.0's design document, in both of its forms, line by line; a comment says
where a line differs from the printed one. trainer.mode=controller is the single-controller mode."""

import sys
from typing import Any

from datasets import load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl import (
    GRPOConfig,
    InferenceEngine,
    LocalToolingEnv,
    MegatronActor,
    MegatronRef,
    ModelRequest,
    ModelResponse,
    RemoteSGLangEngine,
    RolloutController,
    StatsLogger,
    TrainController,
    Trajectory,
    WeightUpdateMeta,
    load_expr_config,
    load_hf_tokenizer,
    make_scheduler,
    parse_calls,
    to_batch,
)


def get_current_time() -> str:
    """Returns the time of day."""
    return "12:30"


def my_reward_fn(
    prompt: Any, completion: Any, prompt_ids: Any, completion_ids: list[int], **kwargs: Any
) -> float:
    return len(completion_ids)


def parse_tool(resp: ModelResponse, tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The tool that an answer calls; a random model calls none, so the only one stands for it."""
    for call in parse_calls(resp.completion, "hermes", tools):
        return call.name, call.arguments
    return "get_current_time", {}


class MyRolloutWorkflow:
    def __init__(self, config: Any, gconfig: Any, tokenizer: Any) -> None:
        self.config = config
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.env = LocalToolingEnv()
        self.env.register_tool(get_current_time)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        message = [
            {"role": "system", "content": "Tell the time."},  # "message" in the document
            {"role": "user", "content": data["question"]},
        ]
        rollout = Trajectory()
        reward = 0.0
        for _ in range(self.config.options["num_turns"]):
            tools = self.env.list_tools()
            text = self.tokenizer.apply_chat_template(
                message, tools=tools, tokenize=False, add_generation_prompt=True
            )
            req = ModelRequest(text=text, gconfig=self.gconfig)  # LLMRequest
            resp = await engine.agenerate(req)
            tool_name, tool_args = parse_tool(resp, tools)
            cur_time = await self.env.aexecute(tool_name, tool_args)
            message += [{"role": "user", "content": f"The current time is {cur_time}"}]
            reward += my_reward_fn(None, None, None, resp.output_tokens, **data)
            # a turn is a row, for the messages leave the answer out
            known = rollout.find(resp.input_tokens)
            rollout.read(resp.input_tokens[known.end :], after=known)
            rollout.wrote(resp)
        rollout.score(reward)
        output = to_batch([rollout])
        return output


def main_grpo() -> None:
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)  # rollout_config, training_config
    dataset = load_dataset("json", data_files=config.train_dataset.path, split="train")
    tokenizer = load_hf_tokenizer(config.actor.path)
    temperature = config.gconfig.temperature
    controlled = config.trainer.mode == "controller"

    rollout: Any = RemoteSGLangEngine.for_run(config, tokenizer=tokenizer)
    actor: Any = MegatronActor(config.actor, temperature=temperature)
    assert config.ref is not None
    ref: Any = MegatronRef(config.ref, temperature=temperature)  # MegatronGRPOActor
    if controlled:
        # Single-controller mode initialization
        scheduler = make_scheduler(config)  # SlurmScheduler()
        rollout = RolloutController(rollout, config, scheduler)
        actor = TrainController(actor, config, scheduler)
        ref = TrainController(ref, config, scheduler)

    rollout.initialize()
    actor.initialize()
    ref.initialize()

    wcfg = WeightUpdateMeta.from_config(
        config.weight_sync, path="unused", addresses=rollout.addresses
    )
    workflow = MyRolloutWorkflow(config.rollout.workflow, config.gconfig, tokenizer)
    logger = StatsLogger.for_run(config)
    # Synchronous RL
    dataloader = StatefulDataLoader(
        dataset, batch_size=config.train_dataset.batch_size, collate_fn=list
    )
    step = 0
    for _epoch in range(config.total_train_epochs):  # config.epoches
        data_generator = iter(dataloader)
        for _ in range(len(dataloader)):
            prompt = next(data_generator)

            # Update inference engine weights
            future = rollout.update_weights(wcfg)
            actor.upload_weights(wcfg)
            future.result()

            # synchronous rollout
            batch = rollout.rollout_batch(prompt, workflow=workflow)

            if controlled:  # In the single-controller mode
                x = batch.load_data()
                assert x["input_ids"].shape == x["attention_mask"].shape
                assert x["input_ids"].shape[0] == len(batch)

            # prepare train inputs; the batch needs no copy of its keys
            batch["ref_logp"] = ref.compute_logp(batch)
            adv_batch = actor.compute_advantages_and_returns(batch)
            batch["advantages"] = adv_batch["advantages"]

            # PPO update
            stats = actor.ppo_update(batch)
            print(stats)
            figures = {"samples": len(batch), "servers_version": rollout.get_version()}
            figures["mean_reward"] = batch["rewards"].mean().item()
            logger.commit(0, step, step, stats | figures)
            step += 1

    logger.close()
    for part in (rollout, ref, actor):
        part.destroy()


if __name__ == "__main__":
    main_grpo()
