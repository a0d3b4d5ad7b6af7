"""Defines a harness of verifiers that chats in the worker itself: no program starts for each turn,
and nothing is downloaded. It has no tools; for those name another harness (null, bash, ...)."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class ChatConfig(vf.HarnessConfig):
    """Configures the harness: it has no options of its own."""


class ChatHarness(vf.Harness[ChatConfig]):
    """Asks the model once for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Returns once the model has answered."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(m) for m in prompt or []]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        ok = answer.status_code == 200
        return vf.ProgramResult(
            exit_code=0 if ok else 1, stdout="", stderr="" if ok else answer.text
        )


__all__ = ["ChatHarness"]
