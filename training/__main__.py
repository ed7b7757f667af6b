"""Train a model from a recipe, measure it, and leave a folder that is a complete Hub repository.

    accelerate launch -m training RECIPE.yaml [--key value ...]
    python -m training evaluate MODEL --data PATH [--key value ...] | --senses PATH | --task NAME
    python -m training prepare RECIPE.yaml [--key value ...]
    python -m training plan RECIPE.yaml [--minutes M [--fit]] [--gpus 8xH100] [--key value ...]
    python -m training new OBJECTIVE --data PATH [--minutes M] [--columns SOURCE TARGET] [--output RECIPE.yaml]
    python -m training verify CARD_FOLDER [--key value ...]

Where the package is installed, it is `hf_scratch_transformer.training`, and `scratch-transformer train` and `evaluate`
are the same in one process. RECIPE may also be the name of one that comes with it.

The second measures a finished model, a folder or an id on the Hub, and writes nothing; the third tokenises the training
split ahead of a run, which else does so at its first start; the fourth says what a run will take; the fifth writes a
recipe for a text and a number of minutes; the last trains the recipe of a model card from another seed, and says
whether that ends where the card's seeds do. `--help` lists the keys. A run's folder (`--output_dir`) holds
`recipe.yaml`, `environment.json`, `tokenizer/`, `metrics.jsonl`, `curves.png`, `checkpoints/` and `model/`.

Exit codes: 0 done, 1 failed, 2 the recipe or its data cannot be used, 130 and 143 stopped by SIGINT and SIGTERM (saved;
`--resume` goes on). `accelerate launch` makes 1 of all but 0, with a traceback of its own unless it is told `--quiet`;
`python -m training` gives them as they are.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

from . import leaving_at_once, uncollected

with leaving_at_once(), uncollected():  # these take seconds, in which one may think better of it
    import torch
    import transformers

    from hf_scratch_transformer.onednn import onednn_products

    from . import evaluation, launcher, loop
    from .cards import verify
    from .checkpoints import CheckpointError
    from .folder import claimed
    from .plan import plan
    from .preparation import prepare
    from .proposal import propose
    from .publication import publish
    from .recipe import Recipe, parse, recipe_path, reference, shipped
    from .run import KEPT_RUNS, Interrupted, TrainingError, finish, open_accelerator, open_run
    from .score import score
    from .sections import RecipeError


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if {"-h", "--help"} & {*arguments}:
        try:
            recipes = textwrap.fill(f"Recipes that come with it, by their names: {', '.join(shipped())}.", 80)
            print(HELP, recipes, "", reference(shutil.get_terminal_size().columns), sep="\n", flush=True)
        except BrokenPipeError:  # `| head` has read enough; what is left would be written again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    try:
        if arguments[:1] == ["evaluate"]:
            score(arguments[1:])
        elif arguments[:1] == ["prepare"]:
            prepare(parse(arguments[1:]))
        elif arguments[:1] == ["plan"]:
            plan(arguments[1:])
        elif arguments[:1] == ["new"]:
            propose(arguments[1:])
        elif arguments[:1] == ["verify"]:
            if wrong := verify(arguments[1:], train):
                raise TrainingError(f"{arguments[1]}: not as the card says: {', '.join(wrong)}")
        else:
            train(parse(arguments), recipe_path(arguments[0]))
    except RecipeError as error:
        return _complain(error, 2)
    except (TrainingError, CheckpointError, OSError) as error:
        return _complain(error, 1)
    except Interrupted as stop:
        return _complain(stop, 128 + stop.number)
    except KeyboardInterrupt:
        return _complain(Interrupted(signal.SIGINT), 128 + signal.SIGINT)
    return 0


def train(recipe: Recipe, source: Path) -> None:
    """A whole run of the recipe in the file `source`, from its folder to the Hub."""
    accelerator = open_accelerator(recipe)
    with claimed(Path(recipe.output_dir)) if accelerator.is_main_process else contextlib.nullcontext():
        run = open_run(recipe, accelerator, source)
        if torch.distributed.is_initialized():
            KEPT_RUNS.append(run)
        accelerator.init_trackers(run.folder.name)
        with onednn_products():
            loop.train(run)
            finish(run)
            publish(run, evaluation.test(run))
        accelerator.end_training()


def _complain(error: BaseException, code: int) -> int:
    print(f"training: {error}", file=sys.stderr)
    return code


HELP = f"""\
usage: accelerate launch -m {__package__} RECIPE.yaml [--key value ...]
       python -m {__package__} evaluate MODEL --data PATH [--key value ...]
       python -m {__package__} prepare RECIPE.yaml [--key value ...]
       python -m {__package__} plan RECIPE.yaml [--minutes M [--fit]]
           [--gpus 8xH100] [--key value ...]
       python -m {__package__} new OBJECTIVE --data PATH [--minutes M]
           [--columns SOURCE TARGET] [--output RECIPE.yaml]
       python -m {__package__} verify CARD_FOLDER [--key value ...]

Train a model from a recipe, a YAML file of the fields below. On the command
line, which wins, keys are dotted: `--key value`, or `--key` alone for true.
Text is taken as written, lists and mappings as JSON; null is for none.

The second line measures a finished model, ours or a native one, on the test
split of a file, a folder or a Hub dataset, and writes nothing. Of the fields it
heeds objective, data, evaluation, optimisation and seed. The third tokenises
the training split ahead of a run, which else does so at its first start. The
fourth does a few steps and says what the run will take, with --minutes, how
many steps fit into these, with --fit beside it, of a model of which size, and
with --gpus, how long the run takes on these. The fifth looks at a text,
measures this machine, and writes a recipe for both, the reason beside each
choice. The last trains the recipe of a model card from another seed, and says
whether that ends where the card's seeds do: the score that weights are chosen
by where 95 of 100 seeds would be, operations within 2%, the corpus the same; if
not, it ends with code 1.
"""


def command(arguments: list[str]) -> NoReturn:
    """Be the process that runs this command line, and end as it does."""
    logging.captureWarnings(True)
    transformers.utils.logging.disable_progress_bar()
    launcher.follow()
    code = main(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
    if KEPT_RUNS:  # the end of the interpreter would free them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command(sys.argv[1:])
