"""Records one episode of sum_chain with the real verifiers as wire.json, for the contract test:

PYTHONPATH=. .venv/bin/python tests/environments/record.py .venv-verifiers/bin/python
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.environments import verifiers
from megarl.rollout.environments.client import EnvironmentConfig, shared_workers
from megarl.rollout.gateway.messages import TokenRequest
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_environments import GatewayEngine

HERE = Path(__file__).parent


async def record(rows: list[Any], path: Path, calls: list[Any]) -> Any:
    tokenizer = save_tokenizer(path)
    tokenizer.name_or_path = str(path)
    gconfig = GenerationHyperparameters(max_new_tokens=16)
    workflow = verifiers.VerifiersWorkflow(None, gconfig, tokenizer)  # type: ignore[arg-type]
    ask, episodes = verifiers.shared_workers, []

    class Spy:
        def __init__(self, config: EnvironmentConfig) -> None:
            self.workers = shared_workers(config)

        async def ask(self, *args: Any, **named: Any) -> Any:
            answer = await self.workers.ask(*args, **named)
            episodes.append(answer["episode"])
            return answer

    verifiers.shared_workers = Spy  # type: ignore[assignment]
    read, write = TokenRequest.read, TokenRequest.answer

    def reading(body: Any, *, trace: str) -> Any:
        calls.append({"trace": trace, "body": json.loads(json.dumps(body))})
        return read(body, trace=trace)

    def writing(asked: Any, answer_id: str, response: Any) -> Any:
        answer = write(asked, answer_id, response)
        calls[-1]["answer"] = {"choices": answer["choices"]}
        return answer

    TokenRequest.read, TokenRequest.answer = reading, writing  # type: ignore
    async with GatewayEngine(tokenizer) as engine:
        await workflow.arun_episode(engine, rows[0])  # type: ignore[arg-type]
    await ask(EnvironmentConfig.read(rows[0]["environment"])).close()
    return episodes[0]


def main() -> None:
    options = {"python": sys.argv[1], "id": "sum_chain", "path": [str(HERE)]}
    rows = verifiers.tasks(DatasetConfig(size=2), seed=0, **options)
    calls: list[Any] = []
    with tempfile.TemporaryDirectory() as path:
        episode = asyncio.run(record(rows, Path(path), calls))
    for call in calls:
        call["body"]["sampling_params"].pop("session")
    wire = {"tasks": [r["task_data"] for r in rows], "calls": calls, "episode": episode}
    (HERE / "wire.json").write_text(json.dumps(wire, indent=1) + "\n")


if __name__ == "__main__":
    main()
