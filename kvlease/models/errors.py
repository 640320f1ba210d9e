"""Errors of model folders, tokenizers and templates.

    ModelError
    ├── ModelUnusable              stops the start of a server; its message is one line that says what to change
    │   ├── ModelUnknown           neither a known name, nor a folder, nor a GGUF file
    │   ├── ModelFolderInvalid     a file of the folder is missing or broken
    │   ├── UnsupportedModel       its attention needs more than this engine has
    │   └── ModelUnavailable       it cannot be fetched or converted here
    └── RequestInvalid             the client's input; HTTP status 400, not retryable
        ├── TextInvalid            text that cannot be tokenized
        └── TemplateFailed         the chat template refused the messages

`http_status` and `code` are what the gateway answers with; nothing of the first branch reaches a client.

Never: carries prompt text in a message.
"""

from __future__ import annotations

from typing import ClassVar


class ModelError(Exception):
    """Root of this tree."""


class ModelUnusable(ModelError):
    """The model cannot be served; the message is one line."""


class ModelUnknown(ModelUnusable):
    """Nothing of this name exists."""


class ModelFolderInvalid(ModelUnusable):
    """A file is missing or broken; the message names it."""


class UnsupportedModel(ModelUnusable):
    """The architecture needs what the engine does not have; the message names it."""


class ModelUnavailable(ModelUnusable):
    """Fetching or converting failed; the message says what to do."""


class RequestInvalid(ModelError):
    """The client's input cannot be used."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"


class TextInvalid(RequestInvalid):
    """The text is not valid Unicode."""

    code: ClassVar[str] = "invalid_text"


class TemplateFailed(RequestInvalid):
    """The chat template raised an error on these messages."""

    code: ClassVar[str] = "chat_template_failed"
