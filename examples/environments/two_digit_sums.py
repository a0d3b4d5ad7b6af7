"""A taskset of the verifiers package, with nothing of megarl in it: sums such as "57+68".

configs/verifiers_grpo.yaml trains on it. `seed` and `size` are its options.
"""

import random

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumConfig(vf.TasksetConfig):
    seed: int = 0
    size: int = 1000


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.size):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            yield SumTask(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]
