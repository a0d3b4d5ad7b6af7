"""A coding agent of forty lines, run as a program: scripted_agent.py TASK. It does what the policy
answers as a shell command, tells it what came of it, and ends where the policy says `done`, or
after its eighth answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main() -> None:
    messages = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(8):
        if (command := ask(messages)) == "done":
            break
        done = subprocess.run(
            command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        messages.append({"role": "assistant", "content": command})
        messages.append({"role": "user", "content": f"{done.returncode}: {done.stdout}"})


if __name__ == "__main__":
    main()
