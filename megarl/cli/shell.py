"""Reads the words of the command that a shell script starts, without running the script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from megarl.config.errors import ConfigError

KEY = re.compile(r"\+*\w+\.\S+=")  # a word that sets a key of Hydra's
_COMMENT = re.compile(r"""(\\.|"(?:\\.|[^"\\])*"|'[^']*')|`\s*#[^`]*`|(?<!\S)#[^\n]*""")
_HERE_DOCUMENT = re.compile(r"(?ms)<<-?\s*['\"]?(\w+)['\"]?([^\n]*\n).*?^\s*\1\b")
_SEPARATORS, _TESTS = "\n;&|", ("[", "[[", "test")
_OPEN, _CLOSE = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done", "}"}
_BEFORE = {"{", "then", "else", "do", "export", "declare", "local", "readonly", "-a", "-x"}
_VARIABLE = re.compile(r"\$(?:\((pwd)\)|\{(\w+)(?::-([^}]*))?\}|(\w+))")
_ALONE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")  # a word that is one variable or array
_SET = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)


def command_words(file: Path, program: str) -> list[str]:
    """Returns the words after `program` in the one command of a script that starts it; all words if
    no command does. Variables and arrays that the script sets are replaced.

    Raises ConfigError if the words depend on a branch, a function or the output of a program, if
    there are several such commands, and for what is no script.
    """
    try:
        text = _HERE_DOCUMENT.sub(r"\2", _COMMENT.sub(r"\1", file.read_text(encoding="utf-8")))
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        commands = list(_commands(lexer))
    except ValueError as e:
        raise ConfigError(f"{file}: {e}; write it as a shell reads it") from e
    starts = [words for _, _, words in commands if program in words]
    if len(starts) > 1:
        raise ConfigError(f"{file}: {len(starts)} commands start {program}; keep one")
    values, arguments = _Values(), list[str]()
    for in_branch, is_sure, words in commands:
        words = values.without_sets(words, is_sure and not in_branch)
        if starts and program not in words:
            if words and KEY.match(words[0]):
                raise ConfigError(f"{file}: {words[0]}: a comment or the end of a line cuts it off")
            continue
        rest = words[words.index(program) + 1 :] if starts else words
        if in_branch and (keys := list(filter(KEY.match, rest))):
            raise ConfigError(f"{file}: {keys[0]}: stands in a branch or function; take it out")
        try:
            arguments += values.replaced(rest)
        except KeyError as e:
            raise ConfigError(f"{file}: ${e.args[0]} depends on a branch; write its value") from e
    for word in arguments:
        if _ALONE.fullmatch(word) or word.startswith("$(") or re.search(r"\s\+*\w+\.[\w.]+=", word):
            raise ConfigError(f"{file}: {word}: write the words of the command in its place")
    return arguments


def _commands(tokens: Iterable[str]) -> Iterator[tuple[bool, bool, list[str]]]:
    """Yields for each command: whether it stands in a branch, a loop or a function, whether no test
    before `&&` or `||` skips it, and its words. An array is one word, NAME=(WORD\\0WORD\\0...)."""
    words, depth, is_sure, parentheses = list[str](), 0, True, 0
    for token in [*tokens, "\n"]:
        is_separator = token != "" and set(token) <= set(_SEPARATORS)
        if parentheses:
            if not is_separator:
                words[-1] += f"\0{token}"
                parentheses += token.count("(") - token.count(")")
        elif not is_separator:
            words.append(token)
            if re.match(r"\w+\+?=\(", token):
                parentheses = token.count("(") - token.count(")")
        else:
            while words and words[0] in _BEFORE:
                depth += words.pop(0) == "{"
            first = words[0] if words else ""
            depth = max(0, depth - (first in _CLOSE))
            if words:
                yield depth > 0 or first in _OPEN, is_sure, words
            depth += first in _OPEN or "{" in words
            words, is_sure = [], not ("||" in token or ("&&" in token and first in _TESTS))


class _Values:
    """The variables and arrays that a script has set so far."""

    def __init__(self) -> None:
        self._variables = {"pwd": ".", "HOME": "${oc.env:HOME}"}
        self._arrays: dict[str, list[str]] = {}
        self._unsure: set[str] = set()

    def without_sets(self, words: list[str], is_sure: bool) -> list[str]:
        """Notes the assignments at the start of a command and returns the other words. is_sure:
        whether the script always runs the command; if not, no later value of the names is known."""
        if not is_sure:
            self._unsure |= {match[1] for match in map(_SET.fullmatch, words) if match}
            return words
        for place, word in enumerate(words):
            if (match := _SET.fullmatch(word)) is None:
                return words[place:]
            name, plus, value = match.groups()
            try:
                if value.startswith("(") and value.endswith(")"):
                    inner = self.replaced(value[1:-1].split("\0"))
                    self._arrays[name] = self._arrays.get(name, []) + inner if plus else inner
                else:
                    text = self._replaced(value)
                    self._variables[name] = self._variables.get(name, "") + text if plus else text
                self._unsure.discard(name)
            except KeyError:
                self._unsure.add(name)
        return []

    def replaced(self, words: Iterable[str]) -> list[str]:
        """Returns the words with values in place of variables. Raises KeyError."""
        result: list[str] = []
        for word in words:
            alone = _ALONE.fullmatch(word)
            if alone and alone[1] in self._unsure:
                raise KeyError(alone[1])
            value = self._replaced(word)
            if alone and alone[1] in self._arrays:
                result += self._arrays[alone[1]]
            elif alone and KEY.search(value):
                result += shlex.split(value)
            elif word not in ("", "$@", "${@}"):
                result.append(value)
        return result

    def _replaced(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2] or match[4]
            if name in self._unsure:
                raise KeyError(name)
            return self._variables.get(name, match[0] if match[3] is None else match[3])

        return _VARIABLE.sub(value, text)
