"""A scripted policy behind a real gateway, for agents that are commands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

from examples.cli_agent import CommandLineAgent
from megarl.api.records import ModelRequest, ModelResponse
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig
from megarl.rollout.gateway.session import Session
from tests.unit.test_gateway import StubEngine

Script = Callable[[str], str]  # of the text of a prompt: the policy's answer


class ScriptedPolicy(StubEngine):
    """Answers as a script says. Its gateway listens while it is entered."""

    def __init__(self, tokenizer: Any, script: Script, **config: Any) -> None:
        super().__init__(tokenizer)
        self.tokenizer, self.script, self.config = tokenizer, script, config
        self.prompts: list[str] = []

    async def __aenter__(self) -> Self:
        async def context() -> int:
            return 200_000

        self.gateway = Gateway(self, GatewayConfig(**self.config))  # type: ignore[arg-type]
        await self.gateway.start(context)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.close()

    @contextlib.asynccontextmanager
    async def session(self, *args: Any, **named: Any) -> AsyncIterator[Session]:
        with self.gateway.session(*args, **named) as session:
            yield session

    def _answer(self, request: ModelRequest) -> ModelResponse:
        self.prompts.append(self.tokenizer.decode(request.input_ids))
        answer = self.script(self.prompts[-1])
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids.append(self.tokenizer.eos_token_id)
        self.wrote.append(
            ModelResponse(
                input_tokens=list(request.input_ids),
                output_tokens=ids,
                output_logprobs=[-self.rng.random() for _ in ids],
                output_versions=[3] * len(ids),
                stop_reason="stop",
            )
        )
        return self.wrote[-1]


class ScriptedAgent(CommandLineAgent):
    """Runs tests/scripted_agent.py."""

    usual_program = "python3"

    def command(self, task: str) -> list[str]:
        return [self.program, str(Path(__file__).with_name("scripted_agent.py")), task]

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        return {"URL": base_url, "KEY": api_key}


def write(texts: Mapping[str, str]) -> str:
    """A shell command that writes files."""
    return "\n".join(f"cat > {path} <<'END'\n{text}END" for path, text in texts.items())
