"""Errors of the command.

    CommandError            ends the command with one line on stderr; never retryable
    ├── ConfigurationError  a value, key, name or port that cannot be used (exit code 2)
    └── Unreachable         a server that was asked did not answer (exit code 1)

Never: carries more than one line, or a secret.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Root of this tree. `exit_code` is what the process ends with."""

    exit_code = EXIT_FAILED


class ConfigurationError(CommandError):
    """Something that was configured cannot be; the message names it and says what to change."""

    exit_code = EXIT_REFUSED


class Unreachable(CommandError):
    """A gateway that was asked did not answer usefully."""
