"""Chat templates in Jinja for any tokenizer; training, evaluation and exports share their text."""

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)


def _literal(text: str) -> str:
    """Returns a text as a string literal in a Jinja expression."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


_BOS = "{% if bos_token %}{{ bos_token }}{% endif %}"


def _two_role_template(
    name: str, system: str, user: str, answer: str, before_first: str = ""
) -> str:
    """Returns a template in FastChat's style ADD_COLON_TWO: headers, EOS after answers.

    Args:
      name: the template's name, for messages.
      system: the system text of a conversation without a system turn.
      user: header of a user's turn.
      answer: header of an assistant's turn.
      before_first: the text between the system text and the first turn.
    """
    return (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set "
        "turns = messages[1:] %}"
        "{% else %}{% set system = "
        + _literal(system)
        + " %}{% set turns = messages %}{% endif %}"
        + _BOS
        + "{{ system }}"
        "{% for message in turns %}{% if message['role'] == 'user' %}"
        "{{ ("
        + _literal(before_first)
        + " if loop.first else '') + "
        + _literal(user)
        + " + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}{{ "
        + _literal(answer)
        + " + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('"
        + name
        + " has no ' + message['role'] + ' turn') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + _literal(answer.rstrip()) + " }}{% endif %}"
    )


def _control_token_template(bos: str, header: str, end: str) -> str:
    """Returns a template in which control tokens mark the header and end of each turn.

    Args:
      bos: the conversation's beginning, in Jinja.
      header: header of a turn, with ROLE for its role.
      end: the end of a turn; begins with a control token.
    """
    before, after = (_literal(part) for part in header.split("ROLE"))
    return (
        bos
        + "{% for message in messages %}{{ "
        + before
        + " + message['role'] + "
        + after
        + " + message['content'] + "
        + _literal(end)
        + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ "
        + _literal(header.replace("ROLE", "assistant"))
        + " }}{% endif %}"
    )


_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = "
    "messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    + _BOS
    + "{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('llama-2 has no ' + message['role'] + ' turn') }}{% endif %}{% "
    "endfor %}"
)
_PLAIN = (
    _BOS + "{% for message in messages %}"
    "{{ ('' if loop.first else '\\n\\n') + message['content'] }}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)

BUILT_IN = {
    # FastChat's, with the separators " " and "</s>".
    "vicuna_v1.1": _two_role_template("vicuna_v1.1", VICUNA_SYSTEM, "USER: ", " ASSISTANT: ", " "),
    "koala": _two_role_template("koala", "BEGINNING OF CONVERSATION:", "USER: ", " GPT: ", " "),
    # Meta's, as in transformers: BOS before each exchange, a space before EOS.
    "llama-2": _LLAMA_2,
    "llama-3": _control_token_template(
        _BOS, "<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"
    ),
    "chatml": _control_token_template("", "<|im_start|>ROLE\n", "<|im_end|>\n"),
    # As in Stanford's train.py, without a space after the colon; further exchanges continue in the
    # same way.
    "alpaca": _two_role_template(
        "alpaca", ALPACA_SYSTEM, "\n\n### Instruction:\n", "\n\n### Response:"
    ),
    # No names of roles: turns are separated by an empty line, EOS ends the conversation.
    "plain": _PLAIN,
}
VICUNA = BUILT_IN["vicuna_v1.1"]
NAMES = (*BUILT_IN, "tokenizer")
# Control tokens that a template writes besides the tokenizer's BOS and EOS.
CONTROLS = {
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
