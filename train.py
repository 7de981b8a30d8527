"""Fine-tunes a Hugging Face model, or trains one from scratch, on long contexts.

    python train.py --model.path MODEL --data.path FILE [--section.field value ...]
    python train.py --config RECIPE.yaml [--section.field value ...]

The same command again resumes the run. Without a recipe the planner chooses
mesh and memory for the available devices, and the run takes one epoch with
learning rate 1e-5, or 1e-4 for adapters. Alone, train.py lists the recipes.
Models and data on the Hugging Face hub are downloaded unless cached. In the
names of flags - and _ are the same. LONGSTRIPE_TRACEBACK=1 shows where an error
comes from.

Exit codes: 0 trained; 1 a dry run that does not fit; 2 an error that you can
fix, in one line; 75 one that a restart may cure, such as a lost connection; 130
stopped by Ctrl-C, 143 by SIGTERM: the running step is finished and saved, and
the same command resumes the run; a second Ctrl-C ends at once, as both do
before the first step.
"""

import os
import shlex
import sys
from typing import TYPE_CHECKING

from data.errors import UserError
from data.signals import end_at_once
from trainer import entry

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


# The most tokens that the shortest case of eval.needle takes, whatever the tokenizer.
SHORTEST_NEEDLE = 512


def flag_of(word: str) -> str:
    """Returns a word's flag in the spelling of --help: --dry-run for --dry_run=8xH100."""
    return word.partition("=")[0].replace("_", "-")


def take_flag(words: list[str], flag: str) -> tuple[list[str], str | None]:
    """Returns the other words of the command line, and the flag's value: "" if it has none, None
    without the flag.

    Raises:
      UserError: the flag is given twice, or its value is an empty text.
    """
    index = next((i for i, word in enumerate(words) if flag_of(word) == flag), None)
    if index is None:
        return words, None
    _, equals, value = words[index].partition("=")
    end = index + 1
    if not equals and end < len(words) and not words[end].startswith("--"):
        value, equals, end = words[end], "=", end + 1
    if equals and not value:
        raise UserError(f"command line: {flag}: found '', needs a value, or none at all")
    others = words[:index] + words[end:]
    if any(flag_of(word) == flag for word in others):
        raise UserError(f"command line: {flag} is given twice; keep one of them")
    return others, value


def take_switch(words: list[str], flag: str) -> tuple[list[str], bool]:
    """Returns the other words of the command line, and whether a flag without value is in it.

    Raises:
      UserError: the flag is given twice, or with a value.
    """
    given = [word for word in words if flag_of(word) == flag]
    if len(given) > 1:
        raise UserError(f"command line: {flag} is given twice; keep one of them")
    if given and "=" in given[0]:
        raise UserError(f"command line: {given[0]}: {flag} takes no value")
    return [word for word in words if word not in given], bool(given)


def next_commands(config: "RunConfig", processes: int) -> str:
    """Returns a line with the commands that export, evaluate and report the trained run.

    Args:
      config: of the run, or of its last stage.
      processes: the number that trained it.
    """
    location, begin, mesh = config.location, "next: ", config.mesh
    project = os.path.dirname(os.path.realpath(__file__))
    if os.getcwd() != project:  # where alone `python -m` finds the commands
        begin = f"next: cd {shlex.quote(project)}; "
        location = location if config.in_bucket else os.path.abspath(location)
    run = shlex.quote(location)
    trained = shlex.quote(f"{location}/best") if config.checkpoint.best else run
    # The commands write to this machine.
    output = shlex.quote(f"runs/{config.name}") if config.in_bucket else run
    rows = mesh.rows

    def flags(**sizes: int) -> str:
        # An evaluation runs in one process, with the devices of one machine.
        return "".join(
            f" --{name} {size}" for name, size in sizes.items() if size > 1 and processes == 1
        )

    if config.trajectories.path:
        devices = flags(
            simulate=mesh.simulate, seeds=rows, fsdp=rows, sequence=mesh.sequence * mesh.tensor
        )
        return (
            f"{begin}python -m eval.in_context --checkpoint {trained}{devices} --output "
            f"{output}/in_context; python -m eval.report {run}"
        )
    tokens = max(_evaluated_tokens(config), SHORTEST_NEEDLE)
    devices = flags(
        simulate=mesh.simulate, rows=rows, fsdp=rows, tensor=mesh.tensor, sequence=mesh.sequence
    )
    return (
        f"{begin}python -m scripts.export_hf {trained} {output}/exported; python -m eval.needle "
        f"--checkpoint {trained} --tokens {tokens}{devices} --output {output}/needle; python -m "
        f"eval.report {run}"
    )


def _evaluated_tokens(config: "RunConfig") -> int:
    """Returns the tokens of a row, or fewer if the model has no positions for as many."""
    from eval.live import known_tokens
    from trainer.model_source import choose_model

    rows = config.data.context_length
    try:
        source = choose_model(config.model, config.adapter.path, weights=False)
    except (UserError, ValueError, OSError):  # such as an earlier stage that is gone by now
        return rows
    return min(rows, known_tokens(config, source) or rows)


def report_dry_run(config: "RunConfig", machine: str, memory: str | None) -> bool:
    """Prints what the recipe would take on a machine; returns whether it fits."""
    from planning.dry_run import dry_run

    if config.evaluations or config.samples.prompts:
        from eval.live import measured_names

        return dry_run(config, machine, memory, prepare=measured_names)
    return dry_run(config, machine, memory)


def evaluation_kinds() -> dict[str, type]:
    """Returns the sections of a recipe's `evaluations`, for --help: all tests' fields, then each
    test's."""
    from eval.live import TESTS
    from eval.live_test import LiveTest

    return {"": LiveTest, **{f"test: {name}": test for name, test in TESTS.items()}}


def train_all_stages(config: "RunConfig") -> None:
    """Trains every stage of the recipe, then prints the commands that come next."""
    entry.keep_compiled(config.compile_cache)
    import jax

    from trainer.evaluation import Evaluation, HeldOutLoss
    from trainer.loop import train
    from trainer.objectives import objective_class
    from trainer.stages import stages_of, stages_to_train

    run = stages_of(config)[-1]  # the last stage, if none is left to train
    for stage, stage_follows in stages_to_train(config):
        run = stage
        if stage.auto:
            from planning.auto import resolve

            run = resolve(stage)
        evaluations: list[Evaluation] = [HeldOutLoss(run.train.evaluate_every)]
        if run.evaluations or run.samples.prompts:
            from eval.live import evaluations_of

            evaluations += evaluations_of(run)
        train(run, objective_class(run), evaluations, stage_follows)
    if config.logging.console and jax.process_index() == 0:
        print(next_commands(run, jax.process_count()), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Trains as the command line says; returns the exit code, 1 if a --dry-run does not fit."""

    def work() -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        if asks := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
            from trainer.config.help_pages import help_text

            section = "".join(words[asks[0] + 1 :][:1])
            print(help_text(section, __doc__ or "", {"evaluations": evaluation_kinds}))
            return 0
        words, offline = take_switch(words, "--no-download")
        if offline:
            from data.hub import no_downloads

            no_downloads()
        words, machine = take_flag(words, "--dry-run")
        words, memory = take_flag(words, "--gpu-memory")
        if memory is not None and machine is None:
            raise UserError(
                "command line: --gpu-memory only applies to --dry-run MACHINE; without it the "
                "devices say how much they have"
            )
        if not words:
            from trainer.config.recipes import recipe_list

            print(recipe_list())
            return 0
        from trainer.config import load as configuration

        config = configuration.load(words, ["dry-run", "gpu-memory", "no-download"])
        if config.evaluations:
            from eval.live import with_tests

            config = with_tests(config)
        if machine is not None:
            return 0 if report_dry_run(config, machine, memory) else 1
        train_all_stages(config)
        return 0

    return entry.run(work)


if __name__ == "__main__":
    end_at_once()
    entry.leave(main())
