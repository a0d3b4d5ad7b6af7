"""GSM8K with a tool, or with a teacher who answers the model: verl's multi-turn walkthrough.

    python examples/gsm8k_tools.py --out data/gsm8k [--source openai/gsm8k]
    megarl launch --config configs/gsm8k_tools_grpo.yaml actor.path=MODEL

The first command writes train.parquet and test.parquet in verl's columns; files that verl's own
script wrote do as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

from megarl.rollout.rewards import get_reward_fn
from megarl.rollout.workflows.multi_turn import Interaction, Reply

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Call "
    "`calc_gsm8k_reward` at least once with your answer before you give your final one, and put "
    "that in the form `#### <answer>`."
)
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
RIGHT = "Your response is correct!"
gsm8k = get_reward_fn("gsm8k")


def calc_gsm8k_reward(answer: str, row: dict[str, Any]) -> str:
    """Checks an answer to the question, to be called before the final answer.

    Args:
        answer: the model's answer to the question, a number
    """
    score = gsm8k("", f"#### {answer.strip()}", [], [], answer=row["answer"])
    return f"Current parsed answer={answer!r} reward={score}"


class Teacher(Interaction):
    """Says of every answer whether it is right, and lets the model try again."""

    async def respond(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> Reply:
        score = gsm8k("", messages[-1]["content"], [], [], answer=row["answer"])
        return Reply(text=RIGHT if score else WRONG, done=bool(score))


def rows_of(split: Dataset, name: str) -> Dataset:
    """Returns GSM8K's rows in verl's columns: the prompt demands a call, and the ground truth is in
    reward_model and extra_info."""

    def convert(row: dict[str, str], index: int) -> dict[str, Any]:
        truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
        return {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": row["question"]},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {
                "split": name,
                "index": index,
                "answer": row["answer"],
                "question": row["question"],
            },
        }

    return split.map(convert, with_indices=True, remove_columns=split.column_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the parquet files")
    parser.add_argument("--source", default="openai/gsm8k", help="hub name, or a directory with it")
    args = parser.parse_args()
    name = None if Path(args.source).is_dir() else "main"
    source = load_dataset(args.source, name)
    assert isinstance(source, DatasetDict)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = rows_of(source[split], split)
        rows.to_parquet(args.out / f"{split}.parquet")
        print(f"{args.out / split}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
