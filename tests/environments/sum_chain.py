"""An environment of verifiers with several turns: it speaks between the model's answers. fail:
tasks with these numbers raise an error after the first answer. die: the process ends once, which
this file tells from then on."""

import os
import random

import verifiers.v1 as vf


class ChainData(vf.TaskData):
    sums: list[list[int]]


class ChainTask(vf.Task[ChainData, vf.State, vf.TaskConfig]):
    pass


class ChainConfig(vf.TasksetConfig):
    seed: int = 1
    size: int = 100
    turns: int = 3


class ChainTaskset(vf.Taskset[ChainTask, ChainConfig]):
    def load(self):
        print("an environment may print")
        rng = random.Random(self.config.seed)
        for _ in range(self.config.size):
            sums = [[rng.randint(10, 99), rng.randint(10, 99)] for _ in range(self.config.turns)]
            yield ChainTask(ChainData(prompt="{}+{}".format(*sums[0]), sums=sums), self.config.task)


class ChainEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    fail: list[int] = []  # noqa: RUF012
    die: str = ""


class ChainEnv(vf.Env[ChainEnvConfig]):
    async def run(self, task, agents):
        sums, right = task.data.sums, 0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            if task.data.idx in self.config.fail:
                raise RuntimeError("the game broke down")
            if self.config.die and not os.path.exists(self.config.die):
                with open(self.config.die, "w"):
                    os._exit(9)
            for i, (a, b) in enumerate(sums):
                if segment.terminated:
                    break
                right += segment.last_reply.strip() == str(a + b)
                if i + 1 < len(sums):
                    segment = await talk.turn("{}+{}".format(*sums[i + 1]))
        talk.trace.record_reward("right", right / len(sums), 1.0)


__all__ = ["ChainEnv", "ChainTaskset"]
