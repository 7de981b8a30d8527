"""Tokenizers and templates against transformers and hand-written texts; typed control tokens stay
text."""

import functools
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import Message, with_last_answer_trained
from data.errors import UserError
from data.templates import (
    NAMES,
    end_ids,
    jinja_template,
    missing_controls,
    render,
)
from data.templates.built_in import ALPACA_SYSTEM, BUILT_IN, CONTROLS, VICUNA_SYSTEM
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.smollm2 import smollm2_dir

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
MODEL = REPOSITORY / "data/fixtures/tiny.model"
TALK = [
    ("user", "Who are you? 123"),
    ("assistant", "I'm Pim, é 😀 fine."),
    ("user", "a\n\n  b"),
    ("assistant", "You too!"),
]


def _messages(talk):
    return [Message(role, content) for role, content in talk]


def _ids(segments):
    return [token for segment in segments for token in segment.ids]


def _trained(tokenizer, segments):
    return [
        tokenizer.decode(segment.ids, skip_special=False) for segment in segments if segment.train
    ]


ALL_CONTROLS = [token for tokens in CONTROLS.values() for token in tokens]


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def pair(request, tmp_path_factory):
    """Returns our tokenizer and transformers' for one folder, with the control tokens of every
    template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    Tokenizer.load(TINY if request.param == "tiny" else smollm2_dir()).with_controls(
        ALL_CONTROLS
    ).save(folder)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", NAMES)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_ids_equal_apply_chat_template(pair, template, system, prompt):
    ours, theirs = pair
    talk = [("system", "Be brief.")] * system + TALK[: 3 if prompt else 4]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in talk],
        chat_template=jinja_template(template, ours),
        add_generation_prompt=prompt,
        return_dict=False,
    )
    assert _ids(render(_messages(talk), template, ours, prompt)) == expected


def by_hand(template, talk, bos, eos):
    """Returns the text of [system] user assistant ... turns under a template, as (part, is trained
    on)."""
    system = talk[0][1] if talk[0][0] == "system" else None
    pairs = list(
        zip(talk[system is not None :: 2], talk[(system is not None) + 1 :: 2], strict=True)
    )
    exchanges = [(question, answer) for (_, question), (_, answer) in pairs]
    parts = []
    if template in ("vicuna_v1.1", "koala"):
        default, name = (
            (VICUNA_SYSTEM, "ASSISTANT")
            if template == "vicuna_v1.1"
            else ("BEGINNING OF CONVERSATION:", "GPT")
        )
        parts.append((f"{bos}{system or default} ", False))
        for question, answer in exchanges:
            parts += [(f"USER: {question} {name}:", False), (f" {answer}{eos}", True)]
    elif template == "alpaca":
        parts.append((f"{bos}{system or ALPACA_SYSTEM}", False))
        for question, answer in exchanges:
            parts += [
                (f"\n\n### Instruction:\n{question}\n\n### Response:", False),
                (f"{answer}{eos}", True),
            ]
    elif template == "llama-2":
        rules = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
        for question, answer in exchanges:
            parts += [(f"{bos}[INST] {rules}{question} [/INST]", False), (f" {answer} {eos}", True)]
            rules = ""
    elif template == "llama-3":
        parts.append((bos, False))
        for role, text in talk:
            parts.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
            parts.append((f"{text}<|eot_id|>", role == "assistant"))
    elif template == "chatml":
        for role, text in talk:
            parts += [
                (f"<|im_start|>{role}\n", False),
                (f"{text}<|im_end|>", role == "assistant"),
                ("\n", False),
            ]
    elif template == "plain":
        parts.append((bos, False))
        for number, (role, text) in enumerate(talk):
            parts += [("\n\n" if number else "", False), (text, role == "assistant")]
        parts.append((eos, True))
    return parts


def ids_and_mask(theirs, parts):
    """Returns transformers' ids of the whole text, and which of them overlap a trained part."""
    encoded = theirs(
        "".join(text for text, _ in parts), add_special_tokens=False, return_offsets_mapping=True
    )
    ends = list(itertools.accumulate(len(text) for text, _ in parts))
    trained = [
        range(end - len(text), end) for (text, train), end in zip(parts, ends, strict=True) if train
    ]
    mask = [
        any(start < part.stop and part.start < end for part in trained)
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask


def mask_of(segments):
    return [segment.train for segment in segments for _ in segment.ids]


# The fixtures' conversations, and files named in the environment, such as FastChat's.
FILES = [
    REPOSITORY / "data/fixtures/conversations.json",
    *map(Path, filter(None, os.environ.get("LONGSTRIPE_CONVERSATIONS", "").split(os.pathsep))),
]


@functools.cache
def records(file):
    return json.loads(file.read_text(encoding="utf-8"))


def conversations(file, controls, count=200):
    """Returns the first `count` clean conversations with alternating roles, as (role, text)."""
    talks = []
    for record in records(file):
        talk = [
            (
                "user"
                if turn["from"] in ("human", "user")
                else "assistant"
                if turn["from"] == "gpt"
                else "?",
                turn["value"].strip(),
            )
            for turn in record["conversations"]
        ]
        talk = talk[: len(talk) // 2 * 2]
        clean = all(text and not any(control in text for control in controls) for _, text in talk)
        if (
            talk
            and clean
            and [role for role, _ in talk] == ["user", "assistant"] * (len(talk) // 2)
        ):
            talks.append(talk)
        if len(talks) == count:
            return talks
    raise AssertionError(f"{file}: only {len(talks)} conversations")


@pytest.mark.parametrize("template", BUILT_IN)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ids_and_masks_of_200_conversations_match_hand_written_texts(pair, template, file):
    ours, theirs = pair
    for number, turns in enumerate(conversations(file, ours.controls)):
        talk = [("system", "Be brief.\n\nBe kind."), *turns] if number % 3 == 0 else turns
        ids, mask = ids_and_mask(
            theirs, by_hand(template, talk, ours.bos_token or "", ours.eos_token)
        )
        segments = render(_messages(talk), template, ours)
        assert (_ids(segments), mask_of(segments)) == (ids, mask), talk


def sentencepiece_ids_and_mask(library, parts, controls):
    """Returns the same from sentencepiece itself; text between two control tokens is encoded
    separately."""
    ids, mask = [], []
    run, trained = "", []

    def finish():
        nonlocal run, trained
        for piece in library.encode(run, out_type="proto").pieces if run else ():
            ids.append(piece.id)  # offsets are in bytes; the word-start mark has none
            mask.append(
                any(
                    piece.begin < end and start < max(piece.end, piece.begin + 1)
                    for start, end in trained
                )
            )
        run, trained = "", []

    for text, train in parts:
        for number, piece in enumerate(
            re.split("(" + "|".join(map(re.escape, controls)) + ")", text)
        ):
            if number % 2:
                finish()
                ids.append(controls[piece])
                mask.append(train)
            elif piece:
                start = len(run.encode())
                run += piece
                trained += [(start, len(run.encode()))] if train else []
    finish()
    return ids, mask


@pytest.mark.parametrize("template", BUILT_IN)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ids_and_masks_match_sentencepiece(template, file):
    import sentencepiece

    ours = Tokenizer.load(MODEL).with_controls(ALL_CONTROLS)
    library = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    controls = {
        "<s>": 1,
        "</s>": 2,
        **{token: len(library) + number for number, token in enumerate(ALL_CONTROLS)},
    }
    for talk in conversations(file, ours.controls):
        expected = sentencepiece_ids_and_mask(
            library, by_hand(template, talk, "<s>", "</s>"), controls
        )
        segments = render(_messages(talk), template, ours)
        assert (_ids(segments), mask_of(segments)) == expected, talk


@pytest.mark.parametrize("template", BUILT_IN)
def test_the_loss_covers_the_last_answer_or_the_flagged_ones(pair, template):
    ours, _ = pair
    whole = render(_messages(TALK), template, ours)
    last = render(with_last_answer_trained(_messages(TALK)), template, ours)
    assert _ids(last) == _ids(whole)
    muted = [Message(role, text, train=number != 1) for number, (role, text) in enumerate(TALK)]
    assert render(muted, template, ours) == last  # only the second answer in both cases
    first, second = ("".join(_trained(ours, segments)) for segments in (whole, last))
    assert "Pim" in first and "Pim" not in second and "You too!" in second and "fine" not in second
    assert first.endswith(second)
    silent = [Message(role, text, train=number != 3) for number, (role, text) in enumerate(TALK)]
    assert not any(
        segment.train for segment in render(with_last_answer_trained(silent), template, ours)
    )


@pytest.mark.parametrize("folder", [TINY, MODEL], ids=["tiny", "sentencepiece"])
def test_missing_control_tokens_are_refused_or_added(tmp_path, folder):
    from transformers import AutoTokenizer

    bare = Tokenizer.load(folder)
    for template, tokens in CONTROLS.items():
        assert missing_controls(template, bare) == tokens
        with pytest.raises(
            UserError, match=r"lacks; data\.add_control_tokens: true adds them"
        ) as caught:
            render(_messages(TALK), template, bare)
        assert all(token in str(caught.value) for token in tokens)
        extended = bare.with_controls(missing_controls(template, bare))
        assert [extended.controls[token].id for token in tokens] == [
            bare.vocab_size + i for i in range(len(tokens))
        ]
        assert (
            extended.vocab_size == bare.vocab_size + len(tokens)
            and extended.fingerprint != bare.fingerprint
        )
        for text in ("Who are you? 123 é 😀", "".join(tokens), f"a {tokens[0]}"):
            assert extended.encode(text) == bare.encode(text)  # typed control tokens stay text
        extended.save(tmp_path / template, jinja_template(template, extended))
        again = Tokenizer.load(tmp_path / template)
        theirs = AutoTokenizer.from_pretrained(tmp_path / template)
        assert (again.bos_id, again.eos_id) == (bare.bos_id, bare.eos_id)
        assert again.controls == extended.controls
        assert [theirs.convert_tokens_to_ids(token) for token in tokens] == [
            again.controls[token].id for token in tokens
        ]
        assert (
            end_ids("tokenizer", again)
            == end_ids(template, extended)
            == (extended.controls[tokens[-1]].id,)
        )
        assert _ids(render(_messages(TALK), "tokenizer", again)) == _ids(
            render(_messages(TALK), template, extended)
        )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "vicuna",
            r"found 'vicuna'; did you mean vicuna_v1\.1\? vicuna_v1\.1, koala, .*, tokenizer, or as .* FILE\.jinja, .* would work$",
        ),
        (
            "?",
            r"found '\?'; vicuna_v1\.1, koala, .*, tokenizer, or as .* FILE\.jinja, .* would work$",
        ),
        (
            "tokenizer",
            r"found 'tokenizer' \(the default: the model's own\), .* no chat template; choose one, such as --data",
        ),
        (
            "koala",
            "found 'koala', which writes EOS, and the tokenizer names no eos_token; one that is "
            "named .* would work$",
        ),
    ],
)
def test_an_unusable_template_is_refused_by_field(tmp_path, template, words):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    with pytest.raises(
        UserError, match=r"^data\.template, or the template of one of data\.sources: " + words
    ):
        jinja_template(template, Tokenizer.load(tmp_path))


def test_templates_without_control_tokens_end_answers_with_eos():
    tokenizer = Tokenizer.load(TINY)
    for template in set(BUILT_IN) - set(CONTROLS):
        assert missing_controls(template, tokenizer) == () and end_ids(template, tokenizer) == (
            tokenizer.eos_id,
        )


_TYPED = [
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    *ALL_CONTROLS,
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "### Response:",
    "USER:",
    "<|",
    "{{ eos_token }}",
    "\ufdd0",
    "\ufdd00\ufdd1",
    " ",
    "\n",
]
_TEXT = st.lists(
    st.one_of(st.sampled_from(_TYPED), st.text(max_size=8)), min_size=1, max_size=5
).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(_TEXT, min_size=2, max_size=5))
def test_user_text_never_becomes_a_control_id_under_any_template(texts):
    """A conversation of any texts has only its template's control ids, the same as one of clean
    texts."""
    roles = ["system", "user", "assistant", "user", "assistant"][
        5 - len(texts) if len(texts) % 2 == 0 else 0 :
    ][: len(texts)]
    for folder, template in itertools.product((TINY, MODEL, smollm2()), NAMES):
        tokenizer = _cached(folder, with_controls=True)
        if template == "tokenizer" and tokenizer.chat_template is None:
            continue
        controls = {control.id for control in tokenizer.controls.values()}
        typed, clean = (
            [
                t
                for t in _ids(
                    render(
                        [Message(r, c) for r, c in zip(roles, contents, strict=True)],
                        template,
                        tokenizer,
                    )
                )
                if t in controls
            ]
            for contents in (texts, ["x"] * len(texts))
        )
        assert typed == clean, (template, texts)


def test_vicuna_writes_fastchats_text_and_trains_only_on_answers():
    tokenizer = Tokenizer.load(TINY)
    segments = render(_messages(TALK), "vicuna_v1.1", tokenizer)
    assert tokenizer.decode(_ids(segments), skip_special=False) == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: Who are you? "
        "123 ASSISTANT: I'm Pim, é 😀 fine.</s>USER: a\n\n  b ASSISTANT: You too!</s>"
    )
    assert _trained(tokenizer, segments) == [" I'm Pim, é 😀 fine.</s>", " You too!</s>"]
    muted = [Message("user", "Hi"), Message("assistant", "No.", train=False), *_messages(TALK[2:])]
    assert _trained(tokenizer, render(muted, "vicuna_v1.1", tokenizer)) == [" You too!</s>"]
    # The model sees the same prefix in training as in generation.
    prompt = _ids(render(_messages(TALK[:1]), "vicuna_v1.1", tokenizer, add_generation_prompt=True))
    assert list(segments[0].ids) == prompt and VICUNA_SYSTEM in tokenizer.decode(prompt)


# Tool turns as in Llama 3.1's template, with generation blocks for transformers' masks.
MARKED = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}{{ '<|eot_id|>' }}"
    "{% else %}{{ message.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def test_a_template_with_json_and_generation_blocks_matches_transformers(pair, tmp_path):
    ours, theirs = pair
    ours.save(tmp_path, MARKED)
    talk = [
        ("user", 'Say "é"'),
        ("assistant", "f(1)"),
        ("tool", '{"a": "é\n"}'),
        ("tool", "x"),
        ("assistant", "Fine."),
    ]
    messages = [{"role": role, "content": content} for role, content in talk]
    expected = theirs.apply_chat_template(
        messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    segments = render(_messages(talk), "tokenizer", Tokenizer.load(tmp_path))
    assert _ids(segments) == expected["input_ids"] and mask_of(segments) == list(
        map(bool, expected["assistant_masks"])
    )


def test_smollm2s_template_trains_on_answers_and_their_end_token():
    tokenizer = Tokenizer.load(smollm2_dir())
    segments = render(_messages(TALK), "tokenizer", tokenizer)
    assert _trained(tokenizer, segments) == ["I'm Pim, é 😀 fine.<|im_end|>", "You too!<|im_end|>"]


@pytest.mark.parametrize("folder", [TINY, MODEL, None], ids=["tiny", "sentencepiece", "smollm2"])
def test_typed_control_tokens_stay_text(folder):
    tokenizer = Tokenizer.load(folder or smollm2_dir())
    controls = {control.id for control in tokenizer.controls.values()}
    assert controls
    for text in tokenizer.controls:
        for typed in (text, f"a{text}b", f"{text}{text} \n{text}", f" {text} "):
            ids = tokenizer.encode(typed)
            assert not controls & set(ids)
            assert tokenizer.decode(ids) == typed or folder == MODEL
        answer = render(
            [Message("user", text), Message("assistant", text)], "vicuna_v1.1", tokenizer
        )
        clean = render([Message("user", "x"), Message("assistant", "y")], "vicuna_v1.1", tokenizer)
        assert [t for t in _ids(answer) if t in controls] == [
            t for t in _ids(clean) if t in controls
        ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(["<s>", "</s>", "<pad>", "<unk>", "\ufdd0", " "]), st.text()),
        max_size=6,
    )
)
def test_text_never_becomes_a_control_id(parts):
    text = "".join(parts)
    for folder in (TINY, MODEL):
        tokenizer = _cached(folder)
        assert not {c.id for c in tokenizer.controls.values()} & set(tokenizer.encode(text))


_loaded = {}
smollm2 = functools.cache(smollm2_dir)


def _cached(folder, with_controls=False):
    if (folder, with_controls) not in _loaded:
        tokenizer = Tokenizer.load(folder)
        _loaded[folder, with_controls] = (
            tokenizer.with_controls(ALL_CONTROLS) if with_controls else tokenizer
        )
    return _loaded[folder, with_controls]


def test_control_tokens_that_are_unigram_pieces_stay_text(tmp_path):
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Library

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "</s>abc")]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.add_special_tokens([AddedToken("</s>")])
    library.save(str(tmp_path / "tokenizer.json"))
    assert library.encode("a</s>").ids[-1] == 1  # the library itself gives the control id
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids and tokenizer.decode(ids).replace(" ", "") == "a</s>b"


def test_user_defined_sentencepiece_symbols_stay_text(tmp_path):
    import sentencepiece

    lines = iter(["the fox and the crow"] * 20)
    prefix = str(tmp_path / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=prefix,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<|im_end|>"],
        minloglevel=2,
        hard_vocab_limit=False,
    )
    tokenizer = Tokenizer.load(prefix + ".model")
    symbol = tokenizer.controls["<|im_end|>"].id
    assert symbol in sentencepiece.SentencePieceProcessor(model_file=prefix + ".model").encode(
        "a<|im_end|>"
    )
    assert symbol not in tokenizer.encode("a<|im_end|>")


def test_sentencepiece_ids_match_the_library():
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    tokenizer = Tokenizer.load(MODEL)
    for text in ("line fox: 37", "  two  spaces", "é 😀\n\nx", "The tower of Tarn."):
        assert (
            tokenizer.encode(text) == library.encode(text)
            and tokenizer.decode(tokenizer.encode(text)) == text
        )
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 1000)
    segments = render(_messages(TALK), "vicuna_v1.1", tokenizer)
    text = VICUNA_SYSTEM + " USER: Who are you? 123 ASSISTANT: I'm Pim, é 😀 fine."
    rest = "USER: a\n\n  b ASSISTANT: You too!"
    assert _ids(segments) == [1, *library.encode(text), 2, *library.encode(rest), 2]
    assert [t.strip() for t in _trained(tokenizer, segments)] == [
        "I'm Pim, é 😀 fine.</s>",
        "You too!</s>",
    ]


@pytest.mark.parametrize("folder", [TINY, MODEL], ids=["tiny", "sentencepiece"])
def test_transformers_loads_a_saved_folder_with_the_training_template(tmp_path, folder):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.load(folder)
    tokenizer.save(tmp_path / "out", chat_template=jinja_template("vicuna_v1.1", tokenizer))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    again = Tokenizer.load(tmp_path / "out")
    assert again.chat_template == jinja_template("vicuna_v1.1", tokenizer)
    talk = [{"role": role, "content": content} for role, content in TALK]
    segments = render(_messages(TALK), "tokenizer", again)
    assert _ids(segments) == _ids(render(_messages(TALK), "vicuna_v1.1", tokenizer))
    text = theirs.apply_chat_template(talk, tokenize=False)
    assert text.startswith("<s>A chat between") and text.endswith(" ASSISTANT: You too!</s>")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (again.bos_id, again.eos_id)
    if folder == TINY:
        assert theirs.apply_chat_template(talk, return_dict=False) == _ids(segments)


def test_unusable_tokenizers_and_templates_are_one_line_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(UserError, match="no tokenizer in this folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(TINY)
    with pytest.raises(
        UserError, match=r"vicuna_v1\.1, koala, .*, tokenizer, or as .* FILE\.jinja, .* would work"
    ):
        render(_messages(TALK), "vicunia", tokenizer)
    with pytest.raises(UserError, match="tool"):
        render([Message("user", "a"), Message("tool", "b")], "vicuna_v1.1", tokenizer)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    tokenizer.save(tmp_path / "bare")
    (tmp_path / "bare/tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": None})
    )
    with pytest.raises(UserError, match="no chat template"):
        render(_messages(TALK), "tokenizer", Tokenizer.load(tmp_path / "bare"))


def test_rendering_time_is_linear_in_the_number_of_turns(tmp_path):
    """30,000 turns once took 50 s, nearly all of it spent counting them."""
    tokenizer, seconds = Tokenizer.load(TINY), {2_000: [], 20_000: []}
    for turns in 3 * list(seconds):
        start = time.process_time()
        render([Message("user", "a"), Message("assistant", "b")] * (turns // 2), "plain", tokenizer)
        seconds[turns].append(time.process_time() - start)
    # The minimum of three runs each: a busy machine slows them unevenly.
    assert min(seconds[20_000]) < 30 * min(seconds[2_000]) and min(seconds[20_000]) < 10
