"""Defines the one exception of this package, which holds everything wrong with a configuration."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_CODE = 2  # of a process that ends with a ConfigError, as argparse and POSIX tools do


class ConfigError(ValueError):
    """Holds one problem or several, each one line that names the key, the value and the fix."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        assert self.problems, "a ConfigError needs a problem"
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Has pickle make it of its problems; else it would be of the letters of its text."""
        return type(self), (self.problems,)

    def report(self) -> str:
        """Returns the text that a user sees instead of a traceback, without secrets."""
        from megarl.config.secrets import masked_problem  # here, so that --help is instant

        shown = [masked_problem(p) for p in self.problems]
        if len(shown) == 1:
            return f"config error: {shown[0]}"
        lines = "\n".join(f"  - {p}" for p in shown)
        return f"config error: {len(shown)} problems\n{lines}"


def raise_if_any(problems: Iterable[str]) -> None:
    """Raises ConfigError with all `problems`, where there are some."""
    if problems := list(problems):
        raise ConfigError(problems)
