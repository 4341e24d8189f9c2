"""MLX's own error messages, recognized so that they may be logged and sent: they never quote a prompt.

A message begins with the name of a part of MLX in brackets. Sizes, shapes, error numbers and names of files,
kernels and devices follow, never the values of a computation.
"""

from __future__ import annotations

import re

SENTENCE = (
    r"\[(?:METAL|malloc|ring|jaccl|nccl|(?:cuda|metal|load|gpu|distributed|Compile|Event)[\w:]{0,60}"
    r"|\w{1,60}::eval(?:_cpu|_gpu)?)\] ?[ -~]{0,200}"
)
"""A regular expression for a message, up to the end of its line."""

_OWN = re.compile(SENTENCE)


def named(error: BaseException) -> str:
    """The error's type, and its message if it is one of MLX's own."""
    name = type(error).__name__
    own = _OWN.match(str(error)) if type(error) is RuntimeError else None
    return f"{name}: {own[0].rstrip()}" if own is not None else name
