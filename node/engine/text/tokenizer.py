"""The head's tokenizer, read from a model folder.

Most folders hold a `tokenizer.json` which the `tokenizers` library reads alone, in a twentieth of the time
that importing transformers takes. Where transformers would change what is in it (SentencePiece classes),
where there is none, or where the chat template is code, mlx-lm's loader is used, so that tokens are always
those of mlx-lm.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.byte_level import byte_level_table
from sealring.node.engine.contents import check_folder
from sealring.node.engine.text.detokenizer import (
    ApartDetokenizer,
    BytesDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from sealring.node.engine.text.families import THINK
from sealring.node.engine.text.marked import shape_of, with_images
from sealring.node.engine.text.plaintext import PlainText
from sealring.node.engine.text.rendering import refused
from sealring.node.engine.text.sections import Delimiters, SpeltDetokenizer, format_of
from sealring.node.engine.text.shapes import Shape
from sealring.node.engine.text.showing import Shown, Write, placeholder
from sealring.node.engine.text.thinking import Thinking, thinking_of_template
from sealring.node.models.json_files import check_json, read_json

if TYPE_CHECKING:
    from sealring.node.engine.text.rendering import Messages, RenderingProcess, Tools

_ENDS = range(0x100000, 0x10FFFE)
"""Characters for private use, of a plane that plaintext and showing take none of: one is put behind an answer
that is begun."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD = re.compile(r"[A-Za-z0-9_.$-]*")
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", None)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(ABC):
    """One model's tokenizer. Used by the front's threads; encoding and decoding may run at once."""

    end_tokens: frozenset[int]
    """Tokens that end an answer."""

    size: int
    """Token ids are below this."""

    format: Delimiters
    """How the model marks reasoning and tool calls."""

    special: Mapping[int, str]
    """Tokens without a text, by id, and their names."""

    shape = Shape()
    """What the chat template wants of messages and tools."""

    thinking: Thinking
    """What the chat template knows of thinking."""

    _plain: PlainText
    _template: RenderingProcess | None = None
    _render: Callable[[Messages, Tools, Mapping[str, Any]], str] | None = None

    def _use(self, template: RenderingProcess) -> None:
        self._template, self._render = template, template.render
        self.shape = shape_of(template.render_all)

    def encode_chat(
        self,
        messages: Messages,
        tools: Tools = (),
        arguments: Mapping[str, Any] | None = None,
        shown: Shown | None = None,
        *,
        begun: bool = False,
    ) -> list[int]:
        """Tokens of the messages in the model's chat template, ready for the assistant's answer.

        Contents are text, whatever they spell, in messages, tools and `arguments`, which are more variables
        of the template. `shown` are the images of the messages. Of an answer that is `begun`, which is the
        last message, nothing follows its content. Raises InvalidInput: CHAT_TEMPLATE_REFUSED,
        NO_CHAT_TEMPLATE, CONTEXT_TOO_LONG, PROMPT_UNUSABLE, BAD_IMAGE, CANNOT_CONTINUE.
        """
        if self._render is None:
            raise InvalidInput(
                "this model has no chat template",
                reason="NO_CHAT_TEMPLATE",
                hint="send a text to complete instead of messages, or serve a chat model",
                param="messages",
            )
        return _chat(self._plain, (messages, tools, arguments or {}), self._render, shown, begun=begun)

    def placeholder(self, known: Sequence[str]) -> str:
        """The first of these texts that the chat template writes for an image; empty if it knows none.
        From then on `shape` says where images of tools stand."""
        if self._template is None or not (found := placeholder(self._template.render, known)):
            return ""
        self.shape = with_images(self._template.render_all, self.shape, found)
        return found

    def encode_markers(self, text: str) -> list[int]:
        """Tokens of what the server itself writes, the names of special ones included."""
        return self._encode(text, add_special_tokens=False)

    def last_turn(self, tokens: Sequence[int]) -> str:
        """The end of a chat that was encoded, from its last control token on, which no content can hold."""
        return b"".join(map(self.spelling, self._plain.after_controls(tokens))).decode("utf-8", "replace")

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a text that the model shall continue, and that is text, too.

        Raises InvalidInput: CONTEXT_TOO_LONG, PROMPT_UNUSABLE."""
        return self._plain.encode(text, lambda write: write(text), add_special_tokens=True)

    def encode_within(self, written: str, render: Callable[[Write], str]) -> list[int]:
        """Tokens of what `render` makes of texts, whose own are text while those around them may be control
        tokens. Raises as `encode_text`."""
        return self._plain.encode(written, render, add_special_tokens=False)

    def encode_answer(self, text: str) -> list[int]:
        """Tokens of a text as an answer has them. Raises InvalidInput: CONTEXT_TOO_LONG, PROMPT_UNUSABLE."""
        return self._plain.encode(text, lambda write: write(text), add_special_tokens=False)

    def close(self) -> None:
        """No chat is to be encoded any more."""
        if self._template is not None:
            self._template.close()

    @abstractmethod
    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def detokenizer(self, *, spelt: bool = False, begun: bool = False) -> Detokenizer:
        """A new one, for one answer; `spelt` for one that names special tokens to Sections, `begun` for the
        rest of an answer."""

    @abstractmethod
    def spelling(self, token: int) -> bytes:
        """A token as it is spelt by itself, special ones by their name; may be a part of a character."""

    @abstractmethod
    def vocabulary(self) -> str | None:
        """The content of a `tokenizer.json`, for grammars; None for a model without one."""

    @abstractmethod
    def names(self) -> Mapping[str, int]:
        """All tokens as the model's files name them, and their ids."""


def load_tokenizer(path: Path, *, context: int = sys.maxsize, chats: bool = True) -> Tokenizer:
    """The tokenizer of the model folder `path`. Raises ModelError.

    It refuses prompts of `context` tokens or more. Without `chats` it encodes none, and no process is started
    for their template.
    """
    check_folder(path)
    settings = _read_json(path / "tokenizer_config.json")
    if "chat_template_type" in settings or not (path / "tokenizer.json").is_file():
        return LoadedTokenizer(path, context, chats=chats)
    backend = _read_backend(path)
    as_it_stands = _decoder_kind(backend) == "byte level" or settings.get("tokenizer_class") in _GENERIC
    if as_it_stands:
        return FileTokenizer(path, settings, backend, context, chats=chats)
    return LoadedTokenizer(path, context, chats=chats)


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` and the chat template beside it."""

    def __init__(
        self, path: Path, settings: dict[str, Any], backend: Any, context: int, *, chats: bool
    ) -> None:
        self._backend = backend
        self._spelling = Spelling(backend)
        self.size = backend.get_vocab_size(with_added_tokens=True)
        special = _special_tokens(path, settings)
        end = self._backend.token_to_id(special.get("eos_token", ""))
        self.end_tokens = frozenset(_end_tokens(path) | ({end} if end is not None else set()))
        default, with_tools = _template_sources(path, settings)
        source = default + with_tools
        parser = settings.get("tool_parser_type")
        names = backend.get_vocab(with_added_tokens=True)
        about = names, parser if isinstance(parser, str) else "", _kind(path)
        self.format = format_of(source, *about)
        self.thinking = thinking_of_template(source, *about)
        if default and chats:
            variables = special | {"enable_thinking": self.format.thinking is not None}
            self._use(_template(default, variables, with_tools))
        controls = _controls(backend.get_added_tokens_decoder(), source, special)
        self._plain = PlainText(self._encode, controls, _normalizer(backend), context)
        self.special = self._spelling.special

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As a batch of one: `encode` holds the interpreter lock, so no row would get a token meanwhile.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def detokenizer(self, *, spelt: bool = False, begun: bool = False) -> Detokenizer:
        return self._spelling.detokenizer(spelt=spelt, begun=begun)

    def spelling(self, token: int) -> bytes:
        return self._spelling.of(token)

    def vocabulary(self) -> str | None:
        text: str = self._backend.to_str()
        return text

    def names(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found


class LoadedTokenizer(Tokenizer):
    """The tokenizer that mlx-lm's loader makes of a folder; imports transformers."""

    def __init__(self, path: Path, context: int, *, chats: bool) -> None:
        mlx_lm_import.import_whole()
        from mlx_lm.tokenizer_utils import load

        try:
            self._wrapper = load(path, {"trust_remote_code": False})  # nor ask whether it may
        except Exception:
            raise _corrupt(path, "tokenizer") from None
        self.end_tokens = frozenset(_end_tokens(path) | set(self._wrapper.eos_token_ids))
        backend = getattr(self._wrapper, "backend_tokenizer", None)
        self._backend = backend
        self._encoding = threading.Lock()  # transformers sets and resets what all calls share
        self._spelling = None if backend is None else Spelling(backend)
        self.size = len(self._wrapper)
        default, with_tools = _named(self._wrapper.chat_template)
        source = default + with_tools
        controls = _controls(self._wrapper.added_tokens_decoder, source, self._wrapper.special_tokens_map)
        normalizer = None if backend is None else _normalizer(backend)
        self._plain = PlainText(self._encode, controls, normalizer, context)

        parser = getattr(self._wrapper.tool_parser, "__module__", "").rpartition(".")[2]
        names = self._wrapper.get_vocab()
        self.format = format_of(source, names, parser, _kind(path))
        self.thinking = thinking_of_template(source, names, parser, _kind(path))
        self.special = {token: self._wrapper.decode([token]) for token in self._wrapper.all_special_ids}

        # Whether a class's own code writes chats, and how thoughts are asked for: only these names say it.
        if default and chats and self._wrapper._chat_template is None:
            named = self._wrapper.special_tokens_map.items()
            variables = {name: value for name, value in named if isinstance(value, str)}
            thinks = {self._wrapper._thinking_kwarg: self._wrapper.has_thinking}
            self._use(_template(default, variables | thinks, with_tools))
        elif chats and self._wrapper.has_chat_template:  # mlx-lm's code, or the class's
            self._render = self._render_by_code
            self.shape = shape_of(self._render_all)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._encoding:
            return list(self._wrapper.encode(text, add_special_tokens=add_special_tokens))

    def _render_all(self, chats: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        texts: list[str | None] = []
        for chat in chats:
            try:
                texts.append(self._render_by_code(**chat))
            except InvalidInput:
                texts.append(None)
        return texts

    def _render_by_code(self, messages: Messages, tools: Tools, arguments: Mapping[str, Any]) -> str:
        try:
            rendered = self._wrapper.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **arguments,
            )
            if not isinstance(rendered, str):
                raise TypeError
        except Exception:
            raise refused() from None
        return rendered

    def detokenizer(self, *, spelt: bool = False, begun: bool = False) -> Detokenizer:
        if self._spelling is not None:
            return self._spelling.detokenizer(spelt=spelt, begun=begun)
        window = WindowDetokenizer(
            lambda tokens: self._wrapper.decode(list(tokens), skip_special_tokens=True)
        )
        return SpeltDetokenizer(window, self.special) if spelt else ApartDetokenizer(window, self.special)

    def spelling(self, token: int) -> bytes:
        if self._spelling is not None:
            return self._spelling.of(token)
        try:
            text: str = self._wrapper.decode([token])
        except Exception:  # models have more logits than tokens, and what then happens is up to the class
            return b""
        return text.encode()

    def vocabulary(self) -> str | None:
        return None if self._backend is None else str(self._backend.to_str())

    def names(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._wrapper.get_vocab()
        return found


class Spelling:
    """How the tokens of a `tokenizers` backend are spelt. Special ones have no text and keep others apart."""

    def __init__(self, backend: Any) -> None:
        self.kind = _decoder_kind(backend)
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self.special = {number: str(token.content) for number, token in self._added.items() if token.special}
        self._spell = _spell_byte_level if self.kind == "byte level" else _spell_sentencepiece
        self._token_bytes = lru_cache(maxsize=None)(self._uncached_bytes)

    def detokenizer(self, *, spelt: bool, begun: bool) -> Detokenizer:
        texts = self._texts(begun=begun)
        return SpeltDetokenizer(texts, self.special) if spelt else ApartDetokenizer(texts, self.special)

    def _texts(self, *, begun: bool) -> Detokenizer:
        if self.kind is None:
            return WindowDetokenizer(lambda tokens: self._backend.decode(tokens, skip_special_tokens=True))
        strips = self.kind == "sentencepiece strip"
        return BytesDetokenizer(self._token_bytes, strip_space=strips and not begun)

    def of(self, token: int) -> bytes:
        """The token by itself, special ones by their name."""
        if (added := self._added.get(token)) is not None:
            content: str = added.content
            return content.encode()
        if self.kind is None:
            text: str = self._backend.decode([token], skip_special_tokens=False)
            return text.encode()
        return self._token_bytes(token)

    def _uncached_bytes(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return b"" if added.special else added.content.encode()
        name = self._backend.id_to_token(token)
        return b"" if name is None else self._spell(name)


def _chat(
    plain: PlainText,
    chat: tuple[Messages, Tools, Mapping[str, Any]],
    render: Callable[[Messages, Tools, Mapping[str, Any]], str],
    shown: Shown | None,
    *,
    begun: bool,
) -> list[int]:
    """`chat` is all that comes from outside: what anybody wrote in it stays text."""
    written: list[str] = []

    def collect(text: str) -> str:
        written.append(text)
        return text

    _mapped(chat, collect)
    said = "".join(written)

    end = next(chr(code) for code in _ENDS if chr(code) not in said) if begun else ""
    *before, last = chat[0]

    def rendered(write: Write) -> str:
        if not begun:
            return render(*_mapped(chat, write))
        if not isinstance(last["content"], str):
            raise cannot_continue("its content has several parts")
        whole = [*before, {**last, "content": last["content"] + end}]
        text, found, _ = render(*_mapped((whole, *chat[1:]), write)).partition(end)
        if not found:
            raise cannot_continue("the model's chat template does not show its end")
        return text

    def with_images(write: Write) -> str:
        return rendered(write) if shown is None else shown.within(rendered, write, said)

    return plain.encode(said, with_images, add_special_tokens=False, param="messages")


def cannot_continue(why: str) -> InvalidInput:
    """The error for an answer that is begun and cannot be continued."""
    return InvalidInput(
        f"the answer that was begun cannot be continued: {why}",
        reason="CANNOT_CONTINUE",
        hint="leave it out, or end with a message of the user",
        param="messages",
    )


def _mapped(value: Any, write: Write, name: str = "") -> Any:
    """A JSON value with `write` applied to its strings. Words by which a template finds its way are no harm:
    roles, types and names of fields that consist of letters."""
    if isinstance(value, str):
        return value if name in ("role", "type") and _WORD.fullmatch(value) else write(value)
    if isinstance(value, Mapping):
        return {
            (key if _WORD.fullmatch(key) else write(key)): _mapped(inner, write, key)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, write) for inner in value]
    return value


def _controls(added: Mapping[int, Any], source: str, named: Mapping[str, Any]) -> dict[str, int]:
    """Tokens, by name, that belong to templates and not to contents: the special ones, and others that the
    template writes. Templates look for thinking in contents, and an unknown character is no harm."""
    free = {name for pair in THINK for name in pair} | {named.get("unk_token")}
    return {
        token.content: number
        for number, token in added.items()
        if token.content not in free and (token.special or token.content in source)
    }


def _normalizer(backend: Any) -> Callable[[str], str] | None:
    return None if backend.normalizer is None else backend.normalizer.normalize_str


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        check_json(path / "tokenizer.json")
        return Backend.from_file(str(path / "tokenizer.json"))
    except Exception:
        raise _corrupt(path, "tokenizer.json") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none."""
    if not file.is_file():
        return {}
    try:
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise _corrupt(file.parent, file.name) from None
    return content


def _corrupt(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{what} of {path.name} cannot be read",
        reason="TOKENIZER_CORRUPT",
        hint="download or convert the model again",
    )


def _kind(path: Path) -> str:
    """The model's type; empty where the folder does not say it."""
    found = _read_json(path / "config.json").get("model_type")
    return found if isinstance(found, str) else ""


def _special_tokens(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name -> token, as far as the folder names them."""
    named = {**_read_json(path / "special_tokens_map.json"), **settings}
    found = {}
    for name in _SPECIAL:
        value = named.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[name] = token
    return found


def _end_tokens(path: Path) -> set[int]:
    """As mlx_lm.utils.load_config: the generation settings' end tokens come before the configuration's."""
    configuration = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    ids = generation.get("eos_token_id") or configuration.get("eos_token_id")
    if ids is None and isinstance(configuration.get("text_config"), dict):
        ids = configuration["text_config"].get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return {token for token in listed if isinstance(token, int)}


def _template(source: str, variables: Mapping[str, Any], with_tools: str) -> RenderingProcess:
    from sealring.node.engine.text.rendering import RenderingProcess  # for heads only

    return RenderingProcess(source, variables, with_tools)


def _template_sources(path: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """The default chat template and the one for chats with tools, as transformers finds them; empty when the
    folder has none."""
    told = settings.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    default, with_tools = _named(told)
    files = [path / folder / "tool_use.jinja" for folder in ("chat_templates", "additional_chat_templates")]
    return (
        _text_of(path / "chat_template.jinja") or default,
        next((text for file in files if (text := _text_of(file))), with_tools),
    )


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8") if file.is_file() else ""
    except (OSError, ValueError):
        raise _corrupt(file.parent, file.name) from None


def _named(source: Any) -> tuple[str, str]:
    """The templates named `default` and `tool_use`; a text is the default one."""
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if not isinstance(source, Mapping):
        source = {"default": source}
    default, with_tools = (source.get(name) for name in ("default", "tool_use"))
    return default if isinstance(default, str) else "", with_tools if isinstance(with_tools, str) else ""


def _decoder_kind(backend: Any) -> str | None:
    """`byte level`, `sentencepiece`, `sentencepiece strip` (a space at the start), or None for others."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    if decoder.get("type") == "ByteLevel":
        return "byte level"
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    kinds = [part.get("type") for part in parts]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if parts[0].get("pattern") != {"String": "▁"} or parts[0].get("content") != " ":
        return None
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        return "sentencepiece"
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return "sentencepiece strip" if parts[3:] == [strip] else None


def _spell_sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()


def _spell_byte_level(name: str) -> bytes:
    table = byte_level_table()
    if all(character in table for character in name):
        return bytes(table[character] for character in name)
    return name.encode()
