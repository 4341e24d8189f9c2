"""Trains the byte-level BPE tokenizer on generated conversations: `python make_tokenizer.py --out FOLDER`."""

import argparse
import json
from pathlib import Path
from random import Random

from separation import held_out_questions, training_conversation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
VOCABULARY = 1536

# A message that spells out a special token must not become one: `<|` loses its bar. Calls, and what came of
# them, are marked by text, as Hermes models do it; `calls.py` writes them for training.
CHAT_TEMPLATE = """\
{%- macro turn(role, text) %}{{ '<|' + role + '|>' + text | replace('<|', '<') | trim + '<|end|>' }}
{%- endmacro -%}
{%- set shown = namespace(tools='') -%}
{%- for tool in tools or [] -%}
{%- set function = tool.function -%}
{%- set shown.tools = shown.tools + '\\n- ' + function.name + '('
  + ((function.parameters or {}).properties or {}) | join(', ') + ')'
  + (': ' + function.description if function.description else '') -%}
{%- endfor -%}
{%- set shown.tools = 'You can call these tools:' + shown.tools if shown.tools else '' -%}
{{- bos_token -}}
{%- if shown.tools and messages[0].role != 'system' %}{{ turn('system', shown.tools) }}{% endif -%}
{%- for message in messages -%}
{%- set text = message.content or '' -%}
{%- if message.role == 'system' and loop.first and shown.tools -%}
{{- turn('system', text + '\\n\\n' + shown.tools) -}}
{%- elif message.role in ['system', 'user'] -%}
{{- turn(message.role, text) -}}
{%- elif message.role == 'tool' -%}
{{- turn('user', '<tool_response>\\n' + text + '\\n</tool_response>') -}}
{%- elif message.role == 'assistant' -%}
{%- set said = namespace(text=text) -%}
{%- for call in message.tool_calls or [] -%}
{%- set told = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{%- set said.text = said.text + '\\n<tool_call>\\n' + told | tojson + '\\n</tool_call>' -%}
{%- endfor -%}
{{- turn('assistant', said.text) -}}
{%- else -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


def train(conversations: int) -> Tokenizer:
    """Digits are tokens of their own, so that sums are carried out digit by digit."""
    random, forbidden = Random(7), held_out_questions()
    texts = (
        message["content"]
        for _ in range(conversations)
        for message in training_conversation(random, forbidden)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BEGIN, END, *ROLES.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "tool_parser_type": "json_tools",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=60_000)
    arguments = parser.parse_args()
    save(train(arguments.conversations), arguments.out)


if __name__ == "__main__":
    main()
