"""Ways to decode, on the validation captions: BLEU and chrF, and the seconds of a core that each takes.

    python benchmarks/ablations/minimum_bayes_risk/decode.py MODEL FOLDER > FILE.json

MODEL is the folder of a finished translator, FOLDER has val.en and val.de. Minimum Bayes risk (Kumar & Byrne 2004)
takes the one of several translations that is most like the others, by chrF (Popović 2015).
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import sacrebleu
import torch
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_scratch_transformer.files import weights
from training.folder import environment

ROWS = 32  # decoded together
SAMPLES = 16
CHRF = sacrebleu.CHRF()
Ways = dict[str, dict[str, object]]  # arguments of `generate`
BEAMS: Ways = {
    "greedy": {"num_beams": 1},
    **{f"5 beams, length penalty {p}": {"num_beams": 5, "length_penalty": p} for p in (0.6, 1.0, 1.4)},
    "10 beams": {"num_beams": 10},
}
SAMPLED: Ways = {  # as Freitag et al. 2023 have them: no token below a probability of 0.02
    f"minimum Bayes risk of {SAMPLES} samples": {
        "do_sample": True,
        "num_beams": 1,
        "epsilon_cutoff": 0.02,
        "num_return_sequences": SAMPLES,
    },
    f"minimum Bayes risk of {SAMPLES} beams": {"num_beams": SAMPLES, "num_return_sequences": SAMPLES},
}


def likest(texts: list[str]) -> str:
    """The one with the highest mean chrF against all."""
    return max(texts, key=lambda text: sum(CHRF.sentence_score(text, [other]).score for other in texts))


def main(model_folder: str, folder: str) -> None:
    sources, references = (
        (Path(folder) / f"val.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder).eval()
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))

    def translate(name: str, options: dict[str, object], choose: Callable[[list[str]], str]) -> dict[str, object]:
        torch.manual_seed(0)
        start, outputs = time.process_time(), [""] * len(sources)
        for first in tqdm(range(0, len(order), ROWS), name):
            rows = order[first : first + ROWS]
            encoded = tokenizer([sources[row] for row in rows], return_tensors="pt", padding=True)
            encoded = {key: encoded[key] for key in ("input_ids", "attention_mask")}
            written = model.generate(**encoded, **options, max_new_tokens=2 * encoded["input_ids"].shape[1] + 10)
            texts = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
            each = len(texts) // len(rows)
            for index, row in enumerate(rows):
                outputs[row] = choose(texts[index * each : (index + 1) * each])
        seconds = time.process_time() - start
        bleu = sacrebleu.corpus_bleu(outputs, [references]).score
        chrf = sacrebleu.corpus_chrf(outputs, [references]).score
        return {"way": name, "bleu": round(bleu, 2), "chrf": round(chrf, 2), "seconds": round(seconds, 1)}

    results = [translate(name, options, lambda texts: texts[0]) for name, options in BEAMS.items()]
    results += [translate(name, options, likest) for name, options in SAMPLED.items()]
    about = environment(torch.device("cpu"), 1) | {"command": ["python", *sys.argv]}
    whole = {"model": model_folder, "weights": weights(Path(model_folder)), "environment": about, "results": results}
    print(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
