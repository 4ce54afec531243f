"""A policy for tests of agents, made in a second: its next tokens come from a table, its log-probs from all
tokens.

It thinks, calls `add` once or twice, with arguments in several spellings, and answers. Text and marks are cut
into tokens that encoding the text never gives, also within characters. Now and then it samples any token at
all.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, MAX_TOKENS = 512, 4096
SURE = 12.0  # logit above any other token's
END, CALL, CALLED, THINK, THOUGHT = (
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
MARKS = [CALL, CALLED, THINK, THOUGHT]
TEMPLATE = """
{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for t in tools or [] %}# {{ t.function.name }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}{% set given = c.function.arguments %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ given if given is string else given | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # as Qwen3's: thoughts of earlier turns are dropped
DIGITS = "123456789"
AFTER: dict[
    str, list[str]
] = {  # the tokens that follow each; one that is named twice is twice as likely
    "\n": [THINK, THINK, "I wi", CALL, CALL, CALL, "The ", "The ", " It"],
    THINK: ["\nI add"],
    "\nI add": [" both", " numb"],
    " both": [" numb"],
    " numb": ["ers.\n"],
    "ers.\n": [THOUGHT],
    THOUGHT: ["\n\n", "\nNow "],
    "\n\n": [CALL, CALL, "The ", "I wi"],
    "\nNow ": [CALL, "The "],
    "I wi": ["ll add"],
    "ll add": [".\n ", " now: "],
    ".\n ": [CALL],
    " now: ": [CALL],
    CALL: ['\n{"na', '\n{"na', '\n{"na', '\n{ "na'],
    '\n{"na': ['me": "ad', 'me": "ad', 'me": "ad', 'me": "ad', 'me": "mu'],
    '\n{ "na': ['me": "ad'],
    'me": "ad': ['d", "arg'],
    'me": "mu': ['l", "arg'],
    'd", "arg': ['uments": {"'],
    'l", "arg': ['uments": {"'],
    'uments": {"': ['a": ', 'b":'],
    'a": ': [f'{digit}, "' for digit in DIGITS],
    'b":': [f'{digit},"' for digit in DIGITS],
    **{f'{digit}, "': ['b": '] for digit in DIGITS},
    **{f'{digit},"': ['a":'] for digit in DIGITS},
    'b": ': [*(f"{digit}}}}}\n" for digit in DIGITS), "x"],
    'a":': [f"{digit}}}}}\n" for digit in DIGITS],
    **{f"{digit}}}}}\n": [CALLED] for digit in DIGITS},
    "x": [CALLED],  # not JSON
    CALLED: [END, END, END, " \n", " Done"],
    " \n": [CALL],
    " Done": [END, "ð"],
    "The ": ["su"],
    " It": [" is"],
    " is": [f" {digit}!" for digit in DIGITS],
    "su": ["m is"],
    "m is": [f" {digit}!" for digit in DIGITS],
    **{f" {digit}!": [END, END, END, " caf", "  \n ", "<|im_"] for digit in DIGITS},
    "  \n ": [END],
    "<|im_": ["end|>"],  # the text of a mark, which encoding takes for the mark
    "end|>": [END, " caf"],
    " caf": ["Ã"],
    "Ã": ["©", "©", END],  # half a character
    "©": [END, "ð"],
    "ð": ["Ł"],  # a character of four bytes
    "Ł": ["ĺ"],
    "ĺ": ["Ģ", "Ģ", END],
    "Ģ": [END],
}
BYTES = {"Ã", "©", "ð", "Ł", "ĺ", "Ģ"}  # names of single bytes, not text
MERGES = [
    ("Ċ", "Ċ"),
    ("a", "d"),
    ("ad", "d"),
    ("Ġ", "s"),
    ("Ġs", "u"),
    ("i", "s"),
    ("}", "}"),
    ("{", '"'),
    ("n", "a"),
]
PAIRS = str.maketrans({"\n": "Ċ", "\t": "ĉ", " ": "Ġ"})


def spelled(token: str) -> str:
    """The token as a byte-level vocabulary holds it."""
    return token if token in {*BYTES, *SPECIAL, *MARKS} else token.translate(PAIRS)


def make_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *MARKS, *alphabet, *("".join(pair) for pair in MERGES)]
    pieces += [spelled(token) for token in AFTER]
    pieces += [f"word{number}" for number in range(VOCABULARY)]  # never encoded
    vocabulary = {
        piece: number
        for number, piece in enumerate(list(dict.fromkeys(pieces))[:VOCABULARY])
    }
    made = Tokenizer(models.BPE(vocabulary, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=SPECIAL[0]
    )
    found.chat_template = TEMPLATE
    return found


def table(tokenizer: Any) -> torch.Tensor:
    """Logits [next token, token]."""
    ids = tokenizer.convert_tokens_to_ids
    logits = torch.zeros(VOCABULARY, VOCABULARY)
    for token, following in AFTER.items():
        row = torch.zeros(VOCABULARY)
        for each in following:
            row[ids(spelled(each))] += 1
        logits[:, ids(spelled(token))] = torch.where(
            row > 0, SURE + row.clamp(min=1).log(), 0
        )
    return logits


def save(folder: Path) -> Path:
    """Write the model and its tokenizer as a Hugging Face folder."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,  # the residual stream is the last token, and a little of those before
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        model.model.norm.weight.fill_(VOCABULARY**-0.5)
        model.lm_head.weight.copy_(table(tokenizer))
        layer = model.model.layers[0]
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.mul_(0.03 / 6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
