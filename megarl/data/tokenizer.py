"""Loads tokenizers of Hugging Face directories and hub names, or reads their own files without
transformers for checks, and makes tokens of rows by their chat templates: prompts for RL,
conversations with a loss mask for SFT. It imports no torch of itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.api.chat_template import ChatTemplate
from megarl.config.dataset import SourceConfig
from megarl.config.recipes import BaseConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.rows import Row
from megarl.data.sources import describe
from megarl.utils.http import shown

Message = dict[str, Any]
NUM_LONGEST = 16  # rows of a source that are compared with limits
TRAIN_ON = ("all", "last")
# the words with which a template marks what the assistant writes
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPTIONS: dict[str, tuple[type, str]] = {
    "system": (str, "text"),
    "chat_template_kwargs": (dict, "keys and values"),
}
# transformers' classes that make the same tokens as tokenizer.json
_PLAIN = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend")
_NOT_PLAIN = {"auto_map", "extra_special_tokens", "model_specific_special_tokens"}
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}  # of messages


def load_hf_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a directory or hub name. Raises ValueError where there is none, and
    for one that needs code, without trust_remote_code: with it, code that lies beside the tokenizer
    runs, which some published tokenizers need; it may do anything."""
    if not path:
        raise ValueError(
            "load_hf_tokenizer(''): no path; set tokenizer_path, or give the model's, actor.path"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as e:
        if "trust_remote_code" not in str(e):
            raise ValueError(
                f"{path!r} has no tokenizer that can be loaded: add its tokenizer.json, or set "
                f"tokenizer_path to a directory that has one ({shown(str(e))})"
            ) from e
        raise ValueError(
            f"the tokenizer of {path} needs code that lies beside it: read that code, then set "
            "trust_remote_code=true"
        ) from e


def run_tokenizer(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the tokenizer of a run whose model lies in `model_path`, with the chat template that
    the configuration names."""
    path = cfg.tokenizer_path or model_path
    tokenizer = load_hf_tokenizer(path, trust_remote_code=cfg.trust_remote_code)
    if file := cfg.chat_template:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
    return tokenizer


def tokenizer_to_save(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the run's tokenizer where it has to be saved with the model, None where it is the one
    in the model's own directory."""
    if cfg.tokenizer_path or cfg.chat_template:
        return run_tokenizer(cfg, model_path)
    return None


def is_plainly_sound(
    cfg: BaseConfig, model_path: str, problems: Callable[[Any], Iterable[str]]
) -> bool:
    """Returns whether `problems` has none with the run's tokenizer, read without transformers:
    importing it takes longer than all other checks of a start. Otherwise transformers has the last
    word: a caller then asks `problems` about the tokenizer of `run_tokenizer`."""
    try:
        file = cfg.chat_template
        text = Path(file).read_text(encoding="utf-8") if file else ""
        tokenizer = PlainTokenizer(Path(cfg.tokenizer_path or model_path), text)
        return not any(problems(tokenizer))
    except Exception:  # a tokenizer's files may be wrong in any way
        return False


class PlainTokenizer:
    """Has what a `Template` uses of transformers' tokenizers: tokenizer.json by `tokenizers`, the
    chat template by Jinja. It makes the same texts and tokens, or raises any exception: for files,
    templates and messages of which transformers makes more, and for unsound ones."""

    def __init__(self, directory: Path, chat_template: str = "") -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        if config["tokenizer_class"] not in _PLAIN or config.keys() & _NOT_PLAIN:
            raise ValueError(f"{directory}: {config['tokenizer_class']} is not plain")
        from tokenizers import Tokenizer  # here: not every check reads a tokenizer

        self.name_or_path = str(directory)
        self._tokens = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.added_tokens_decoder = self._tokens.get_added_tokens_decoder()
        named = {k: v for k, v in config.items() if k.endswith("_token") and v}
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
        self._named = {k: text for k, text in texts.items() if isinstance(text, str)}
        self.eos_token: str = self._named["eos_token"]
        self.eos_token_id = self._tokens.token_to_id(self.eos_token)
        file = directory / "chat_template.jinja"
        own = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        self.chat_template: str = chat_template or own
        self._template = _environment().from_string(self.chat_template)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Returns {"input_ids": the tokens of `text`}."""
        encoding = self._tokens.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Returns the text of the messages. Raises NotImplementedError for what transformers does
        besides: tokens, an answer to be continued, other names for a message's thoughts."""
        if (
            tokenize
            or "continue_final_message" in kwargs
            or any(m.keys() - _FIELDS for m in messages)
        ):
            raise NotImplementedError("only transformers does this")
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render(**{"tools": None, **self._named, **kwargs, **variables})


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns what chat templates use, by transformers' page on writing them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Template(ChatTemplate):
    """Makes tokens of messages with the options that every data set takes: system,
    chat_template_kwargs, train_on. Raises ValueError for a tokenizer without a template, an EOS
    token or a vocabulary, and for an option that is wrong.
    """

    fix = (
        "change the dataset's options system and chat_template_kwargs, or take another "
        "tokenizer_path"
    )

    def __init__(self, tokenizer: Any, options: dict[str, Any]) -> None:
        for name, (kind, words) in _OPTIONS.items():
            if options.get(name) is not None and not isinstance(options[name], kind):
                raise ValueError(f"options.{name}={options[name]!r}: not {words}")
        super().__init__(tokenizer, options.get("chat_template_kwargs") or {})
        self._train_on, self._system = options.get("train_on", "all"), options.get("system")
        if self._train_on not in TRAIN_ON:
            raise ValueError(f"options.train_on={self._train_on!r}: use one of {list(TRAIN_ON)}")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {self.name} has no chat template; name a Jinja file that holds one in "
                "chat_template, or a directory whose tokenizer has one in tokenizer_path"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {self.name} has no EOS token: no answer could end")
        self.eos_token_id: int = tokenizer.eos_token_id
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = (tokenizer.eos_token, *(str(t) for t in added if t.special))
        self.encode("What is 1 + 1?")  # without a vocabulary only special tokens are left of text

    def below_system(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages below the option's system message, where they have none."""
        if not self._system or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self._system}, *messages]

    def conversation(
        self, messages: Sequence[Message], *, tools: Sequence[Row] = (), start: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and which of them the assistant wrote: its turns
        with the special token that ends each, or with train_on=last the last turn alone. Turns
        before messages[start] count as told, not as written. Where the
        template ends no turn with one, EOS follows the last turn, as generation has to end.

        A template that marks the assistant's text ({% generation %}) is taken at its word. With
        another one, a turn is what messages[:i+1] render to beyond messages[:i] and the beginning
        of an answer. Raises ValueError where these are not parts of the whole, which a template
        that drops earlier thoughts does, and for messages without an assistant's.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        turns = [i for i in turns if i >= start]
        if not turns:
            raise ValueError("the messages have no assistant's among them to train on")
        if _MARKED.search(self.tokenizer.chat_template):
            first = turns[-1] if self._train_on == "last" else start
            return self.ended_once(*self._marked(messages, tools, first))
        turns = turns[-1:] if self._train_on == "last" else turns
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in self._pieces(messages, turns, tools):
            piece = self.encode(text) if text else []
            if trained and not self._ends(text):  # the last turn, of which nothing tells the end
                piece.append(self.eos_token_id)
            ids += piece
            mask += [trained] * len(piece)
        return self.ended_once(ids, mask)

    def _pieces(
        self, messages: Sequence[Message], turns: Sequence[int], tools: Sequence[Row]
    ) -> Iterator[tuple[str, bool]]:
        """Yields the conversation's text in parts, and whether the assistant wrote each. Tokens are
        made of each part alone, as in RL, where no token of an answer reaches into the prompt."""
        whole = self.render(messages, tools, answer_follows=False)
        done = 0
        for i in turns:
            begin = self.render(messages[:i], tools)
            end = self.render(messages[: i + 1], tools, answer_follows=False)
            if not (end.startswith(begin) and whole.startswith(end)):
                raise self._changed(i)
            answer = end[len(begin) :].rstrip()
            if not self._ends(answer) and i != len(messages) - 1:
                raise ValueError(
                    f"the chat template of tokenizer {self.name} ends message {i} with no special "
                    "token, so nobody could tell that the turn is over; set options.train_on=last"
                )
            yield whole[done : len(begin)], False
            yield answer, True
            done = len(begin) + len(answer)
        if self._ends(whole[:done]):
            yield whole[done:], False

    def ended_once(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """Returns tokens and mask with one EOS at the end of a trained turn. A turn whose text in
        the data has its own EOS would get a second one."""
        kept = [
            t
            for t in range(len(ids))
            if not (t and mask[t] and mask[t - 1] and ids[t] == ids[t - 1] == self.eos_token_id)
        ]
        return [ids[t] for t in kept], [mask[t] for t in kept]

    def _ends(self, text: str) -> bool:
        """Returns whether `text` ends with a special token."""
        return text.endswith(self._special)

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Row], first: int
    ) -> tuple[list[int], list[bool]]:
        """Returns tokens and mask by the template's marks, in messages[first:] only. Raises
        ValueError if the text of messages[:first] is not the beginning of the whole text."""
        encoded = self.apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(m) for m in encoded["assistant_masks"]]
        if first:
            told = self.render(messages[:first], tools, answer_follows=False)
            if not self.render(messages, tools, answer_follows=False).startswith(told):
                raise self._changed(first)
            spans = [encoded.token_to_chars(t) for t in range(len(mask))]
            later = [span is not None and span.start >= len(told) for span in spans]
            mask = [marked and after for marked, after in zip(mask, later, strict=True)]
        if not any(mask):
            raise ValueError(
                f"the chat template of tokenizer {self.name} marks no token of the assistant's; "
                "put its text between {% generation %} and {% endgeneration %}"
            )
        return list(encoded["input_ids"]), mask

    def _changed(self, i: int) -> ValueError:
        """Returns the error of a template that renders earlier messages in another way later."""
        return ValueError(
            f"the chat template of tokenizer {self.name} renders the messages up to {i} in another "
            "way when others follow; set options.train_on=last, or mark the assistant's text in "
            "the template with {% generation %} and train on all turns"
        )


def encode_rows(
    sources: Iterable[tuple[int, Row]], cfg: SourceConfig, tokenizer: Any, purpose: str
) -> Iterator[Row]:
    """Yields the rows of one source with their tokens, as `build_dataset` has them.

    sources: pairs of the row's number, which an error names, and the row.
    Raises ValueError for a tokenizer, an option or a row that is wrong.
    """
    template = Template(tokenizer, cfg.options)
    encode = {"sft": _sft_row, "pairs": _pair_row}.get(purpose, _rl_row)
    for i, row in sources:
        try:
            yield encode(row, template)
        except ValueError as e:
            raise ValueError(f"row {i}: {e}") from e


def num_tokens(row: Row) -> int:
    """Returns the tokens that max_length limits: of the prompt, else of the longest sequence."""
    keys = ("prompt_ids", "input_ids", "chosen_ids", "rejected_ids")
    return max(len(row[key]) for key in keys if key in row)


def none_fits(cfg: SourceConfig, lengths: Iterable[int]) -> ValueError:
    """Returns the error of a data set whose rows all exceed max_length. lengths: tokens per row."""
    lengths = list(lengths)
    return ValueError(
        f"{describe(cfg)} is empty: all {len(lengths)} rows are longer than "
        f"max_length={cfg.max_length} tokens (the shortest has {min(lengths)})"
    )


def longest_rows(
    rows: dict[int, Row], cfg: SourceConfig, tokenizer: Any, purpose: str, *, whole: bool
) -> list[Row]:
    """Returns the NUM_LONGEST longest texts of at most cfg.max_length tokens, with their tokens.

    rows: by number, from the shortest text to the longest.
    whole: False means that the source has further rows.
    Raises ValueError for a row that is wrong, and if max_length leaves no row of a whole source.
    """
    most = cfg.max_length or sys.maxsize
    shortest = encode_rows(rows.items(), cfg, tokenizer, purpose)
    lengths = list(takewhile(most.__lt__, map(num_tokens, shortest)))
    if whole and len(lengths) == len(rows):
        raise none_fits(cfg, lengths)
    encoded = encode_rows(reversed(rows.items()), cfg, tokenizer, purpose)
    numbered = ({"row_id": i} | row for i, row in zip(reversed(rows), encoded, strict=True))
    return list(islice((row for row in numbered if num_tokens(row) <= most), NUM_LONGEST))


def check_context(
    rows: Iterable[Row], gconfig: GenerationHyperparameters, context_length: int
) -> None:
    """Raises ValueError for the first RL row whose prompt and response (gconfig.max_new_tokens) do
    not fit the server's context, in tokens."""
    for row in rows:
        prompt = len(row["prompt_ids"])
        if prompt + gconfig.max_new_tokens > context_length:
            raise ValueError(
                f"row {row['row_id']}: a prompt of {prompt} tokens and "
                f"max_new_tokens={gconfig.max_new_tokens} exceed the servers' context of "
                f"{context_length}; raise server.context_length, or drop long prompts with "
                f"the dataset's max_length={max(0, context_length - gconfig.max_new_tokens)}"
            )


def _rl_row(source: Row, template: Template) -> Row:
    messages = template.below_system(source["messages"])
    prompt = template.render(messages, source.get("tools") or ())
    return source | {"messages": messages, "prompt": prompt, "prompt_ids": template.encode(prompt)}


def _sft_row(source: Row, template: Template) -> Row:
    messages, tools = template.below_system(source["messages"]), source.get("tools") or ()
    response = source.get("response")
    if response is None:
        ids, mask = template.conversation(messages, tools=tools)
    else:
        prompt_ids = template.encode(template.render(messages, tools))
        response_ids = template.encode(response) + [template.eos_token_id]
        written = [False] * len(prompt_ids) + [True] * len(response_ids)
        ids, mask = template.ended_once(prompt_ids + response_ids, written)
    return {"input_ids": ids, "loss_mask": mask}


def _pair_row(source: Row, template: Template) -> Row:
    row: Row = {"margin": source["margin"]} if "margin" in source else {}
    for side in ("chosen", "rejected"):
        ids, mask = _answer(source, side, template)
        row |= {f"{side}_ids": ids, f"{side}_mask": mask}
    return row


def _answer(source: Row, side: str, template: Template) -> tuple[list[int], list[bool]]:
    """Returns the tokens of the prompt and the answer source[side], and the answer's mask."""
    messages, tools = template.below_system(source["messages"]), source.get("tools") or ()
    try:
        return template.conversation([*messages, *source[side]], tools=tools, start=len(messages))
    except ValueError as e:
        raise ValueError(f"{side}: {e}") from e
