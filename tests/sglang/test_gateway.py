"""Agents through the gateway to a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig
from tests.sglang.conftest import Pair
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import PARSER, TEMPLATE, check_exact, responses_agent

GCONFIG = GenerationHyperparameters(max_new_tokens=12, ignore_eos=True)


class Recorded:
    """Asks the real server, and keeps all that it wrote."""

    def __init__(self, pair: Pair) -> None:
        self.client, self.wrote = pair.client, list[ModelResponse]()

    def get_version(self) -> int:
        return self.client.get_version()

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        self.wrote += (answers := await self.client.agenerate_many(reqs))
        return answers


@pytest.mark.parametrize("reuse", [True, False])
def test_what_is_recorded_is_what_the_server_sampled(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, reuse: bool
) -> None:
    tokenizer: Any = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = TEMPLATE
    connection = pair.client.opened()
    engine = Recorded(pair)

    async def context() -> int | None:
        found = await connection.loop.here(connection.pool.context_length())
        assert found == 1024
        return found

    async def run() -> None:
        gateway = Gateway(engine, GatewayConfig(call_format=PARSER, reuse=reuse))
        await gateway.start(context)
        try:
            with gateway.session(GCONFIG, tokenizer) as session:
                await responses_agent(session)
                check_exact(session, engine, rows=1 if reuse else 4)
        finally:
            await gateway.close()

    asyncio.run(run())
