"""`make demo-smollm2`: GRPO on SmolLM2-135M-Instruct with reasoning_gym sums, on CPU.

python examples/smollm2.py [a.b=c ...]        overrides go to configs/smollm2_grpo.yaml

Started again after an interruption, the run continues from its last checkpoint; started again after
its end, it does nothing. trial_name=NAME begins another run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fetch_smollm2 import fetch

ROOT = Path(__file__).resolve().parent.parent
# 270 MB, kept between runs and outside the repository
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megarl"


def main() -> int:
    model = fetch(CACHE / "SmolLM2-135M-Instruct")
    command = [sys.executable, "-m", "megarl.launcher.local"]
    command += ["--config", str(ROOT / "configs" / "smollm2_grpo.yaml"), f"actor.path={model}"]
    return subprocess.run(command + sys.argv[1:], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
