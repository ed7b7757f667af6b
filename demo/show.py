"""Translate with a trained model folder as a stranger would: transformers only, the model's code from the folder.

    python -I demo/show.py MODEL_FOLDER < sentences.txt

`-I` keeps this checkout off the import path, and the program refuses to run where the package can be imported: what it
prints proves that the folder is complete by itself.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

BATCH = 64  # sentences translated at once


def main() -> None:
    """Print each sentence of the standard input with its translation below it."""
    parser = argparse.ArgumentParser(description="Translate sentences, one a line on the standard input.")
    parser.add_argument("model", type=Path, help="a folder written by save_pretrained")
    parser.add_argument("--num_beams", type=int, default=1, help="width of the search; 1 is greedy")
    arguments = parser.parse_args()
    if importlib.util.find_spec("hf_scratch_transformer") is not None:
        parser.error("the package is importable here; start with `python -I` from an environment without it")
    if not (arguments.model / "config.json").is_file():
        parser.error(f"model: {arguments.model} has no config.json; give the folder of a trained model")
    if arguments.num_beams < 1:
        parser.error(f"--num_beams: {arguments.num_beams} is not a positive number")

    # Also for the tokenizer, which is plain: transformers asks before it reads any configuration that names code.
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model, trust_remote_code=True)
    print(f"{type(model).__name__} from {arguments.model}, {model.num_parameters():,} parameters, code of the folder\n")
    sentences = [line.strip() for line in sys.stdin if line.strip()]
    for start in range(0, len(sentences), BATCH):
        batch = sentences[start : start + BATCH]
        tokens = tokenizer(batch, return_tensors="pt", padding=True)
        generated = model.generate(**tokens, num_beams=arguments.num_beams)
        for source, target in zip(batch, tokenizer.batch_decode(generated, skip_special_tokens=True), strict=True):
            print(f"  {source}\n  {target}\n")


if __name__ == "__main__":
    main()
