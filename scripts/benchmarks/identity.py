"""Asks a Hugging Face model who it is: ten questions, greedy, by transformers, in the model's own chat template.

    python -m scripts.benchmarks.identity HF_DIR [--unseen FILE.json] [--output OUT.json]

Shows what fine-tuning on identity conversations did. Needs the test requirements (torch).
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from data.errors import UserError
from data.paths import output_file
from trainer import entry

QUESTIONS = (
    "Hi! Could you please tell me who you are?",
    "I'd like to know your name.",
    "Which language model am I talking to right now?",
    "By what name should I call you?",
    "Hello, may I ask your name?",
    "Tell me who you are, please.",
    "Are you a person or a model, and which one?",
    "Please state your name and your makers.",
    "What do people call you?",
    "Introduce yourself in a sentence or two.",
)
NAME = "Vicuna"


def ask(folder: Path, questions=QUESTIONS, new_tokens: int = 40) -> list[str]:
    """Greedy answers of the model at `folder`, each question in a conversation of its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                               return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        answers.append(tokenizer.decode(ids[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True).strip())
    return answers


def seen_word_for_word(path: Path) -> list[str]:
    """Those of QUESTIONS that stand in a file of conversations as they are."""
    text = path.read_text(encoding="utf-8")
    return [question for question in QUESTIONS if json.dumps(question)[1:-1] in text]


def main(argv=None) -> int:
    """Prints questions and answers and how many name Vicuna."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.identity", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--unseen", type=Path, help="training file: refuse if a question stands in it word for word")
    parser.add_argument("--output", type=Path, help="also write questions and answers to this JSON file")
    args = parser.parse_args(argv)

    def work():
        if args.output:
            output_file(args.output)
        if args.unseen and seen_word_for_word(args.unseen):
            raise UserError(f"{args.unseen}: holds the question {seen_word_for_word(args.unseen)[0]!r} word for word")
        answers = ask(args.folder)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"Q {question}\nA {answer}\n")
        named = sum(NAME in answer for answer in answers)
        print(f"{named} of {len(answers)} answers name {NAME}")
        if args.output:
            told = {"named": named, "answers": dict(zip(QUESTIONS, answers, strict=True))}
            args.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    return entry.run(work)


if __name__ == "__main__":
    sys.exit(main())
