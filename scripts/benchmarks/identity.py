"""Asks a Hugging Face model who it is: forty questions, greedy, by transformers.

    python -m scripts.benchmarks.identity HF_DIR [--unseen FILE.json] [--output OUT.json]

Comparing the answers before and after fine-tuning on identity conversations shows its effect. Needs
the test requirements (torch).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.outputs import output_file
from scripts.benchmarks.commands import write_json
from trainer.options import command, option

# Written before any model's answer to them was seen. The ten before them are in the result's facts.
QUESTIONS = (
    "May I know your name?",
    "Before we start, who am I speaking with?",
    "What should I call you?",
    "Do you have a name?",
    "I am Anna. And you are?",
    "What name were you given by your developers?",
    "Could you give me your name and say what you do?",
    "Please write one sentence about who you are.",
    "Which AI model is answering me?",
    "What model are you?",
    "Is there a name that you go by?",
    "Hey, who is this?",
    "My friend asked me which chatbot I use. What do I tell her?",
    "Fill in the blank: my name is ____.",
    "How would you introduce yourself to a stranger?",
    "State your identity.",
    "Remind me, what was your name again?",
    "I forgot your name. Can you repeat it?",
    "What is the name of this assistant?",
    "Under which name do people know you?",
    "Say hello and tell me your name.",
    "Who am I chatting with today?",
    "Are you an AI? If so, which one?",
    "Are you Siri?",
    "Are you Alexa, or someone else?",
    "Is your name Claude?",
    "I think you are Bard. Am I right?",
    "Are you a human being?",
    "Can you describe yourself briefly?",
    "Give me a short introduction of yourself.",
    "Who exactly are you?",
    "Let us get to know each other. What is your name?",
    "What do your creators call you?",
    "Tell me your name, and then who made you.",
    "Which large language model do you run on?",
    "Sign a letter to me with your own name.",
    "Good morning! With whom do I have the pleasure of speaking?",
    "If I wanted to mention you in a report, which name should I write?",
    "Name yourself.",
    "What is the model name of the assistant in this chat?",
)
NAME = "Vicuna"


def ask(folder: Path, questions=QUESTIONS, new_tokens: int = 40) -> list[str]:
    """Returns the greedy answer of the model in `folder` to each question, each in its own chat."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            ids = model.generate(
                **prompt,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        answers.append(
            tokenizer.decode(
                ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
            ).strip()
        )
    return answers


def verbatim_questions(path: Path) -> list[str]:
    """Returns those of QUESTIONS that a file of conversations contains word for word."""
    text = path.read_text(encoding="utf-8")
    return [question for question in QUESTIONS if json.dumps(question)[1:-1] in text]


def work(args: Options) -> None:
    """Prints questions, answers and how many answers name Vicuna.

    Raises:
      UserError: a question is in the training file.
    """
    if args.output:
        output_file(args.output, b'"named"')
    if args.unseen and (questions := verbatim_questions(args.unseen)):
        raise UserError(f"{args.unseen}: contains the question {questions[0]!r} word for word")
    answers = dict(zip(QUESTIONS, ask(args.folder), strict=True))
    for question, answer in answers.items():
        print(f"Q {question}\nA {answer}\n")
    named = sum(NAME in answer for answer in answers.values())
    print(f"{named} of {len(answers)} answers name {NAME}")
    if args.output:
        write_json(args.output, {"named": named, "answers": answers})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    folder: Path = option("a Hugging Face model folder", positional=True)
    unseen: Path | None = option(
        "training file: refuse if it contains a question word for word", None
    )
    output: Path | None = option("also write questions and answers to this JSON file", None)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
