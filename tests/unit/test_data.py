"""Datasets, their rows, and the loader's order."""

import json

import pytest
import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from examples.tiny_model import make_tokenizer
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.dataset import build_dataloader, build_dataset, collate_sft
from megarl.data.sources import load_rows
from megarl.data.tokenizer import Template, check_context
from megarl.rollout.rewards import get_reward_fn
from tests.tiny_tokenizer import save_tokenizer


def check_names(error: ValueError, names: str) -> None:
    """Asserts that an error is one line and has these words."""
    text = str(error)
    assert "\n" not in text and all(name in text for name in names.split()), text


def sums(tokenizer, *, purpose="rl", seed=1, **cfg):
    config = DatasetConfig(type="arithmetic", **({"size": 50} | cfg))
    return build_dataset(config, tokenizer, purpose=purpose, seed=seed)


def questions(dataset):
    return [row["messages"][-1]["content"] for row in dataset]


# the tokenizer


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    """transformers makes one of special tokens alone out of such a directory."""
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    hollow = AutoTokenizer.from_pretrained(tmp_path)
    assert hollow("<bos>1+1", add_special_tokens=False)["input_ids"]  # one special token
    for purpose in ("rl", "sft"):
        with pytest.raises(ValueError, match=r"makes no tokens of 'What is.*lacks the vocabulary"):
            sums(hollow, purpose=purpose)


def test_text_without_tokens_is_refused_and_an_empty_answer_is_not(tokenizer):
    template = Template(tokenizer, {})
    assert template.encode("") == []
    with pytest.raises(ValueError, match="makes no tokens of 'é'"):
        template.encode("é")  # of which the tokenizer's alphabet has no byte


@pytest.mark.parametrize(
    "text",
    (
        "{{ raise_exception('no system role') }}",
        "{{ messages[7]['role'] }}",
        "{{ 1 / 0 }}",
        "{% if",
    ),
    ids=("raises", "undefined", "divides", "broken"),
)
def test_a_chat_template_that_fails_says_so(tmp_path, text):
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = text
    with pytest.raises(ValueError, match=r"chat template of tokenizer .* fails on .*system, user"):
        sums(tokenizer, options={"system": "Be brief."})


# arithmetic


def test_sums_are_right_and_of_their_level(tokenizer):
    data = sums(tokenizer, options={"level": [1, 3], "ops": "+-*"}, size=200)
    ops = set()
    for row in data:
        (question,) = [m["content"] for m in row["messages"] if m["role"] == "user"]
        assert row["answer"] == str(eval(question))
        op = next(c for c in question[1:] if c in "+-*")
        a, b = question.split(op)
        assert len(a) == len(b) and len(a) in (1, 3)
        assert row["task"] == f"arithmetic{op}{len(a)}"
        ops.add(op)
    assert ops == set("+-*") and len(data) == 200


def test_same_seed_same_sums(tokenizer):
    first = questions(sums(tokenizer))
    assert first == questions(sums(tokenizer))
    assert first != questions(sums(tokenizer, seed=2))
    assert len(set(first)) == 50


def test_train_and_test_are_disjoint_even_mirrored_and_across_seeds(tokenizer):
    def keys(split, seed):
        data = sums(tokenizer, split=split, seed=seed, size=300)
        return {tuple(sorted(q.split("+"))) for q in questions(data)}

    assert keys("train", 1).isdisjoint(keys("test", 1))
    assert keys("train", 1).isdisjoint(keys("test", 2))


def test_careless_demonstrations_forget_the_carry(tokenizer):
    right = sums(tokenizer, purpose="sft", options={"demos": 3}, size=10)
    wrong = sums(tokenizer, purpose="sft", options={"demos": 3, "careless": 1.0}, size=10)
    assert len(right) == len(wrong) == 30

    def pairs(data):
        for row in data:
            prompt = [t for t, m in zip(row["input_ids"], row["loss_mask"]) if not m]
            answer = [t for t, m in zip(row["input_ids"], row["loss_mask"]) if m]
            text = tokenizer.decode(prompt, skip_special_tokens=True)
            a, b = text.removeprefix("user: ").split("\n")[0].split("+")
            yield a, b, tokenizer.decode(answer, skip_special_tokens=True).strip()

    for a, b, answer in pairs(right):
        assert int(answer) == int(a) + int(b)
    for a, b, answer in pairs(wrong):
        digits = [(int(x) + int(y)) % 10 for x, y in zip(a, b)]
        assert int(answer) == int("".join(map(str, digits)))


def test_too_few_problems_of_a_level_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"level=1.*test problems, 500 wanted"):
        sums(tokenizer, split="test", size=500, options={"level": 1})


@pytest.mark.parametrize(
    "options, names",
    [
        ({"levle": 2}, "options.levle=2 arithmetic level"),
        ({"nothing_like_it": 2}, "options.nothing_like_it=2 arithmetic level ops"),
        ({"seed": 2}, "options.seed=2 arithmetic"),
        ({"level": 0}, "level=0"),
        ({"ops": "%"}, "ops='%'"),
        ({"careless": 2.0}, "careless=2.0"),
        ({"count": 0}, "count=0 > 0"),
        ({"demos": "two"}, "options.demos='two' int"),
        ({"level": [2, "x"]}, "options.level=[2, 'x'] int list[int]"),
        ({"system": 7}, "options.system=7 text"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs='x'"),
    ],
)
def test_bad_options_are_named(tokenizer, options, names):
    with pytest.raises(ValueError) as caught:
        sums(tokenizer, options=options)
    check_names(caught.value, names)


def test_more_sums_than_there_can_be_are_not_searched_for(tokenizer):
    with pytest.raises(ValueError, match=r"has only about 100 .*1000000000 wanted"):
        sums(tokenizer, options={"level": 1}, size=10**9)


# rows


def test_rl_rows_hold_the_templated_prompt(tokenizer):
    row = sums(tokenizer, options={"system": "Be brief."})[3]
    question = row["messages"][1]["content"]
    assert row["row_id"] == 3
    assert row["messages"][0] == {"role": "system", "content": "Be brief."}
    assert row["prompt"] == f"<bos>system: Be brief.\n<bos>user: {question}\n<bos>assistant: "
    assert tokenizer.decode(row["prompt_ids"]) == row["prompt"]
    assert row["prompt_ids"].count(tokenizer.bos_token_id) == 3
    assert json.loads(json.dumps(row)) == row


def test_sft_rows_train_on_the_answer_and_eos(tokenizer):
    rl, sft = sums(tokenizer)[0], sums(tokenizer, purpose="sft")[0]
    n = len(rl["prompt_ids"])
    assert sft["input_ids"][:n] == rl["prompt_ids"]
    assert sft["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(sft["input_ids"][n:-1]) == rl["answer"]
    assert sft["loss_mask"] == [False] * n + [True] * (len(sft["input_ids"]) - n)


def test_long_rows_are_dropped_with_a_count(tokenizer, warnings):
    lengths = [len(r["prompt_ids"]) for r in sums(tokenizer, options={"level": [1, 9]})]
    bound = sorted(lengths)[20]
    kept = sums(tokenizer, options={"level": [1, 9]}, max_length=bound)
    dropped = sum(n > bound for n in lengths)
    assert 0 < dropped == 50 - len(kept)
    assert max(len(r["prompt_ids"]) for r in kept) <= bound
    assert any(f"dropped {dropped} of 50 rows" in text for text in warnings)


def test_dataset_emptied_by_the_filter_is_an_error(tokenizer):
    with pytest.raises(
        ValueError, match=r"arithmetic, split test, is empty: all 20 rows.*max_length=3"
    ):
        sums(tokenizer, split="test", size=20, max_length=3)


def test_prompt_beyond_the_context_names_the_row(tokenizer):
    data = sums(tokenizer, options={"level": [1, 9]})
    gconfig = GenerationHyperparameters(max_new_tokens=10)
    longest = max(data, key=lambda r: len(r["prompt_ids"]))
    needed = len(longest["prompt_ids"]) + 10
    check_context(data, gconfig, needed)
    with pytest.raises(ValueError, match=rf"row \d+: a prompt of {needed - 10} tokens.*context"):
        check_context(data, gconfig, needed - 1)


def test_unusable_tokenizer_type_and_purpose(tokenizer):
    class Plain:
        chat_template = None

    with pytest.raises(ValueError, match="Plain has no chat template"):
        sums(Plain())
    with pytest.raises(ValueError, match="purpose='dpo'"):
        sums(tokenizer, purpose="dpo")
    with pytest.raises(ValueError, match="'nope'"):
        build_dataset(DatasetConfig(type="nope"), tokenizer, purpose="rl", seed=1)


# gsm8k, from local files in its format

GSM8K = [
    {"question": f"Tom has {n} apples and buys 1000. How many?",
     "answer": f"He has {n}+1000 = <<{n}+1000={n + 1000}>>{n + 1000}.\n#### {n + 1000:,}"}
    for n in range(5)
]  # fmt: skip


@pytest.fixture
def gsm8k_file(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def write(kind, name, rows=GSM8K):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if kind == "parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def gsm8k(tokenizer, path, *, purpose="rl", **cfg):
    config = DatasetConfig(type="gsm8k", path=str(path), **cfg)
    return build_dataset(config, tokenizer, purpose=purpose, seed=1)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_gsm8k_from_a_file(tokenizer, gsm8k_file, kind):
    data = gsm8k(tokenizer, gsm8k_file(kind, f"train.{kind}"), size=4)
    assert [r["answer"] for r in data] == ["1000", "1001", "1002", "1003"]
    assert data[0]["messages"][0]["content"].startswith(GSM8K[0]["question"])
    assert "\\boxed{}" in data[0]["messages"][0]["content"]
    assert data[0]["task"] == "gsm8k"


def test_gsm8k_from_a_directory_as_the_hub_lays_it_out(tokenizer, gsm8k_file):
    gsm8k_file("parquet", "main/train-00000-of-00001.parquet")
    folder = gsm8k_file("parquet", "main/test-00000-of-00001.parquet", GSM8K[:2]).parent.parent
    assert len(gsm8k(tokenizer, folder)) == 5
    assert len(gsm8k(tokenizer, folder, split="test")) == 2


def test_gsm8k_sft_writes_what_the_reward_accepts(tokenizer, gsm8k_file):
    row = gsm8k(tokenizer, gsm8k_file("jsonl", "train.jsonl"), purpose="sft")[1]
    text = tokenizer.decode(
        [t for t, m in zip(row["input_ids"], row["loss_mask"]) if m], skip_special_tokens=True
    )
    assert text == "He has 1+1000 = 1001.\n\\boxed{1001}"
    assert get_reward_fn("gsm8k")("", text, [], [], answer="1001") == 1.0


ROW = json.dumps(GSM8K[0]).encode()


@pytest.mark.parametrize(
    "name, content, names",
    [
        ("x.jsonl", ROW + b"\n{\n", "x.jsonl line 2 JSON column"),
        ("x.jsonl", ROW + b"\n\n" + ROW[:-1], "x.jsonl line 3 JSON"),
        ("x.jsonl", b"[1, 2]\n", "x.jsonl line 1 [1, 2]"),
        ("x.jsonl", ROW + '\n{"question": "Wie groß"}'.encode("latin-1"),
         "x.jsonl line 2 UTF-8 byte 22 0xdf"),
        ("x.jsonl", ROW.decode().encode("utf-16"), "x.jsonl line 1 UTF-8"),
        ("x.jsonl", b'{"question": null, "answer": "#### 1"}', "line 1 question null"),
        ("x.jsonl", b'{"question": 7, "answer": "#### 1"}', "line 1 question 7"),
        ("x.jsonl", ROW + b'\n{"question": "?", "answer": 42}', 'line 2 answer 42 "answer": "..."'),
        ("x.jsonl", b'{"question": "?", "answer": null}', "line 1 answer null"),
        ("x.jsonl", b'{"question": "?"}', "line 1 ['answer']"),
        ("x.jsonl", b'{"question": "?", "answer": "4"}', "line 1 answer '####'"),
        ("x.jsonl", b'{"question": "?", "answer": "4 ####  "}', "line 1 ####"),
        ("x.jsonl", b'{"question": "\\ud800", "answer": "#### 1"}', r"line 1 question \ud800"),
        ("x.jsonl", b'{"question": ' + b"1" * 5000 + b"}", "line 1 JSON"),
        ("x.jsonl", b"[" * 200_000, "line 1 JSON"),
        ("x.jsonl", b"", "x.jsonl train 0 rows"),
        ("x.json", b"[" + ROW + b", 3]", "x.json row 1 3"),
        ("x.json", b"[" + ROW + b",\n" + ROW, "x.json JSON line 2, column"),
        ("x.parquet", b"PAR1 no", "x.parquet arquet"),
        ("x.tsv", b"a,b", "x.tsv parquet"),
    ],
)  # fmt: skip
def test_gsm8k_names_file_and_line(tokenizer, tmp_path, name, content, names):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        gsm8k(tokenizer, tmp_path / name)
    check_names(caught.value, names)


def test_gsm8k_bad_sources_are_named(tokenizer, gsm8k_file, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.parquet does not exist"):
        gsm8k(tokenizer, tmp_path / "nothing.parquet")
    Dataset.from_dict({"question": [], "answer": []}).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet\), split train, is empty: .*0 rows"):
        gsm8k(tokenizer, tmp_path / "none.parquet")
    rows = [*GSM8K, {"question": None, "answer": "#### 1"}]
    with pytest.raises(ValueError, match=r"null\.parquet row 5: the question is null"):
        gsm8k(tokenizer, gsm8k_file("parquet", "null.parquet", rows))
    with pytest.raises(ValueError, match=r"size=6, but .*five.jsonl, .* has 5 rows; lower size"):
        gsm8k(tokenizer, gsm8k_file("jsonl", "five.jsonl"), size=6)
    with pytest.raises(ValueError, match=r"has no test\*"):
        gsm8k(tokenizer, tmp_path, split="test")


def test_gsm8k_json_may_be_a_list_or_lines_with_a_mark(tokenizer, tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(GSM8K))
    lines = "\n\n".join(json.dumps(r) for r in GSM8K)
    (tmp_path / "lines.json").write_bytes(lines.encode("utf-8-sig"))  # as Windows writes it
    for name in ("list.json", "lines.json"):
        assert len(gsm8k(tokenizer, tmp_path / name)) == len(GSM8K)


def test_rewards_get_the_rows_keys_by_name(tokenizer):
    source = load_rows(DatasetConfig(size=1, batch_size=1), seed=1)[0]
    row = sums(tokenizer, size=1)[0]
    assert set(row) == {*source, "row_id", "prompt", "prompt_ids"}


# reasoning_gym


def gym(tokenizer, *, seed=1, split="train", size=40, **options):
    config = DatasetConfig(
        type="reasoning_gym", split=split, size=size, options={"task": "chain_sum"} | options
    )
    return build_dataset(config, tokenizer, purpose="rl", seed=seed)


def test_reasoning_gym_rows_satisfy_their_scorer(tokenizer):
    data = gym(tokenizer, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
    assert len(data) == 40
    reward = get_reward_fn("reasoning_gym")
    for row in data:
        travelled = json.loads(json.dumps(row))
        assert travelled == row
        assert row["task"] == "chain_sum"
        assert row["entry"]["metadata"]["num_terms"] == 2
        extra = {"entry": travelled["entry"], "answer": row["answer"], "task": row["task"]}
        assert reward("", row["answer"], [], [], **extra) == 1.0


def test_reasoning_gym_splits_are_disjoint_for_any_seeds(tokenizer):
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, test = (set(questions(gym(tokenizer, split=s, **options))) for s in ("train", "test"))
    assert train.isdisjoint(test) and len(train) == len(test) == 40
    assert train.isdisjoint(questions(gym(tokenizer, split="test", seed=2, **options)))
    assert questions(gym(tokenizer)) == questions(gym(tokenizer))
    assert questions(gym(tokenizer)) != questions(gym(tokenizer, seed=2))


def test_reasoning_gym_bad_options_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"options.task='nope'"):
        gym(tokenizer, task="nope")
    with pytest.raises(ValueError, match=r"refuses options.*min_trems"):
        gym(tokenizer, min_trems=2)
    with pytest.raises(ValueError, match=r"distinct train problems.*1000 wanted"):
        gym(tokenizer, size=1000, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert "rearc" in reasoning_gym.factory.DATASETS
    with pytest.raises(ValueError, match="task rearc cannot be used"):
        gym(tokenizer, task="rearc", size=2)


# loader


def loader(tokenizer, *, size=20, batch_size=6, seed=1, **cfg):
    config = DatasetConfig(type="arithmetic", size=size, batch_size=batch_size, **cfg)
    data = build_dataset(config, tokenizer, purpose="rl", seed=1)
    return build_dataloader(data, config, seed=seed)


def ids(batches):
    return [[row["row_id"] for row in rows] for rows in batches]


def test_epochs_are_shuffled_by_the_seed(tokenizer):
    a, b = loader(tokenizer), loader(tokenizer)
    epochs = [ids(a), ids(a)]
    assert epochs == [ids(b), ids(b)]
    assert epochs[0] != epochs[1]
    assert ids(loader(tokenizer, seed=2)) != epochs[0]
    for epoch in epochs:
        assert [len(rows) for rows in epoch] == [6, 6, 6]
        assert len({i for rows in epoch for i in rows}) == 18


def test_unshuffled_and_last_batch(tokenizer):
    plain = loader(tokenizer, shuffle=False, drop_last=False)
    assert [i for rows in ids(plain) for i in rows] == list(range(20))
    assert [len(rows) for rows in ids(plain)] == [6, 6, 6, 2]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("done", [1, 3, 4, 6, 8])
def test_resume_continues_the_order(tokenizer, done, shuffle):
    """`done` batches at 3 batches an epoch: within the first, at its end, in the next ones."""

    def stream(source):
        while True:
            yield from source

    whole, first, second = (loader(tokenizer, shuffle=shuffle) for _ in range(3))
    expected = stream(whole)
    for _ in range(done):
        next(expected)
    before = stream(first)
    for _ in range(done):
        next(before)
    second.load_state_dict(json_or_torch(first.state_dict()))
    after = stream(second)
    for _ in range(7):
        assert ids([next(after)]) == ids([next(expected)])


def json_or_torch(state):
    """A checkpoint's journey."""
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_fewer_rows_than_a_batch_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="5 rows do not fill one batch of batch_size=6"):
        loader(tokenizer, size=5)


def test_collate_sft_pads_on_the_right():
    batch = collate_sft(
        [
            {"input_ids": [5, 6, 7], "loss_mask": [False, True, True]},
            {"input_ids": [8, 9], "loss_mask": [False, True]},
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, True, False]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]


# conversations

CHATS = [
    {
        "dialog": [{"role": "user", "content": f"What is {n}+1?"}],
        "gold": {"value": n + 1},
        "hard": n,
    }
    for n in range(4)
]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_conversations_with_columns_of_any_name(tokenizer, gsm8k_file, kind):
    path = gsm8k_file(kind, f"train.{kind}", CHATS)
    options = {"columns": {"messages": "dialog", "answer": "gold.value"}, "system": "Be brief."}
    config = DatasetConfig(type="chat", path=str(path), options=options, size=3)
    data = build_dataset(config, tokenizer, purpose="rl", seed=1)
    assert len(data) == 3
    row = data[1]
    assert row["prompt"] == ("<bos>system: Be brief.\n<bos>user: What is 1+1?\n<bos>assistant: ")
    # every column reaches the reward, under its own name where it has no other
    assert (row["answer"], row["gold"], row["hard"], row["row_id"]) == (2, {"value": 2}, 1, 1)
    assert "dialog" not in row
    told = DatasetConfig(type="chat", path=str(path), options=options | {"instruction": " Think."})
    (first, *_) = build_dataset(told, tokenizer, purpose="rl", seed=1)
    assert first["messages"][-1]["content"] == "What is 0+1? Think."


@pytest.mark.parametrize(
    "row, options, names",
    [
        ({"q": "1+1?"}, {}, "line 1 messages ['q']"),
        ({"q": "?"}, {"columns": {"messages": "p"}}, "columns.messages=p"),
        ({"messages": [{"role": "user"}]}, {}, "line 1 message 0 content null"),
        ({"messages": [{"content": "x"}]}, {}, 'message 0 {"role"'),
        ({"messages": 3}, {}, "messages 3"),
        ({"messages": "?", "prompt": "x"}, {}, "row 0 prompt columns"),
        ({"messages": [{"role": "assistant", "content": "2"}]}, {}, "assistant"),
        ({"messages": "?"}, {"colums": {}}, "options.colums={} chat"),
        ({"messages": "?"}, {"train_on": "some"}, "options.train_on='some'"),
    ],
)
def test_mistakes_in_conversations_are_named(tokenizer, gsm8k_file, row, options, names):
    path = gsm8k_file("jsonl", "x.jsonl", [row])
    config = DatasetConfig(type="chat", path=str(path), options=options)
    with pytest.raises(ValueError) as caught:
        build_dataset(config, tokenizer, purpose="rl", seed=1)
    check_names(caught.value, names)


TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "No."},
    {"role": "assistant", "content": "two"},
]
# what ends a turn is a special token, and a new line follows it, as in Qwen's and Llama's
TURN = "<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
ENDED = (
    "{% for m in messages %}" + TURN + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# drops an answer's thoughts once the user has gone on, as Qwen3's does
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}(hm){% endif %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def trained_texts(tokenizer, template, **options):
    """The parts of a conversation that are trained on; its tokens are the template's own."""
    tokenizer.chat_template = template
    ids, mask = Template(tokenizer, options).conversation(TURNS)
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(ids) == whole
    parts, last = [], False
    for token, trained in zip(ids, mask, strict=True):
        parts += [[]] if trained and not last else []
        if trained:
            parts[-1].append(token)
        last = trained
    return [tokenizer.decode(part) for part in parts], ids, mask


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_sft_masks_are_those_of_a_template_that_marks_the_answers(train_on):
    tokenizer = make_tokenizer(1)
    texts, ids, mask = trained_texts(tokenizer, ENDED, train_on=train_on)
    assert texts == ["three<|end|>", "two<|end|>"][train_on == "last" :]
    marked = trained_texts(tokenizer, MARKED, train_on=train_on)
    assert (texts, ids, mask) == marked


def test_a_template_that_rewrites_turns_is_refused_or_trained_on_the_last():
    tokenizer = make_tokenizer(1)
    with pytest.raises(ValueError, match="train_on=last"):
        trained_texts(tokenizer, THINKING)
    texts, *_ = trained_texts(tokenizer, THINKING, train_on="last")
    assert texts == ["(hm)two<|end|>"]


def test_a_last_turn_without_an_end_gets_eos(tokenizer):
    template = Template(tokenizer, {"train_on": "last"})
    ids, mask = template.conversation(TURNS)
    assert tokenizer.decode([t for t, m in zip(ids, mask) if m]) == "two<eos>"
    with pytest.raises(ValueError, match="message 1 with no special token"):
        Template(tokenizer, {}).conversation(TURNS)
    with pytest.raises(ValueError, match="no assistant's among them"):
        template.conversation(TURNS[:1])


def test_sft_rows_of_conversations(gsm8k_file):
    tokenizer = make_tokenizer(1)
    path = gsm8k_file("jsonl", "x.jsonl", [{"messages": TURNS}])
    config = DatasetConfig(type="chat", path=str(path))
    (row,) = build_dataset(config, tokenizer, purpose="sft", seed=1)
    ids, mask = Template(tokenizer, {}).conversation(TURNS)
    assert (row["input_ids"], row["loss_mask"]) == (ids, mask)
    # with the answer in a column of its own
    path = gsm8k_file("jsonl", "y.jsonl", [{"q": "1+1?", "a": "two"}])
    options = {"columns": {"messages": "q", "response": "a"}}
    config = DatasetConfig(type="chat", path=str(path), options=options)
    (row,) = build_dataset(config, tokenizer, purpose="sft", seed=1)
    assert tokenizer.decode(row["input_ids"]) == "<|user|>1+1?<|assistant|>two<|end|>"
    assert tokenizer.decode([t for t, m in zip(*row_tokens(row)) if m]) == "two<|end|>"


def row_tokens(row):
    return row["input_ids"], row["loss_mask"]


# marks the content and, apart from it, the calls; no text stands between two turns
TWICE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if m.tool_calls %}<c>{% generation %}f()<|end|>{% endgeneration %}{% endif %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "start", "options", "want"),
    [
        (
            [say("user", "1"), say("assistant", "a", tool_calls=CALL), say("tool", "r")],
            0,
            {},
            "af()<|end|>",
        ),
        (
            [say("user", "1"), say("assistant", "", tool_calls=CALL), say("tool", "r")]
            + [say("assistant", "2"), say("user", "more"), say("assistant", "5")],
            3,
            {},
            "25",
        ),
        ([say("user", "1"), say("assistant", "2"), say("assistant", "5")], 2, {}, "5"),
        (
            [say("user", "1"), say("assistant", "2"), say("assistant", "5")],
            0,
            {"train_on": "last"},
            "5",
        ),
        (
            [
                say("user", "1"),
                say("assistant", "2"),
                say("user", "3"),
                say("assistant", "a", tool_calls=CALL),
            ],
            0,
            {"train_on": "last"},
            "af()<|end|>",
        ),
        (
            [
                say("user", "1"),
                say("assistant", "", tool_calls=CALL),
                say("tool", "r"),
                say("assistant", "2"),
            ],
            3,
            {},
            "2",
        ),
    ],
)
def test_turns_of_a_marking_template_are_those_of_the_messages(messages, start, options, want):
    tokenizer = make_tokenizer(1)
    tokenizer.chat_template = TWICE
    ids, mask = Template(tokenizer, options).conversation(messages, start=start)
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == want


def test_a_marking_template_that_rewrites_what_it_has_told_is_refused():
    tokenizer = make_tokenizer(1)
    tokenizer.chat_template = TWICE.replace(
        "{{ m.content }}{% e", "{{ m.content if loop.last }}{% e"
    )
    messages = [say("user", "1"), say("assistant", "2"), say("assistant", "5")]
    with pytest.raises(ValueError, match="train_on"):
        Template(tokenizer, {}).conversation(messages, start=2)
