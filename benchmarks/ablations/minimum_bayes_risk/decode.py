"""Ways to decode, on the validation captions: BLEU and chrF, and the seconds of a core that each takes.

    python benchmarks/ablations/minimum_bayes_risk/decode.py MODEL FOLDER [WAY ...] > FILE.json

MODEL is the folder of a finished translator, FOLDER has val.en and val.de; each WAY is a name of the lists below,
without one it is all. Minimum Bayes risk (Kumar & Byrne 2004) takes the one of several translations that is most like
the others, by chrF (Popović 2015), or by BLEU as `evaluation.minimum_bayes_risk` does.
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
from training.metrics import least_risk

ROWS = 32  # decoded together
SAMPLES = 16
CHRF = sacrebleu.CHRF()
Ways = dict[str, dict[str, object]]  # arguments of `generate`
Choose = Callable[[list[str], list[float]], str]  # of texts and their logarithms of probabilities
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
BY_BLEU: Ways = {
    f"minimum Bayes risk by BLEU of {choices} translations of {beams} beams": {
        "num_beams": beams,
        "num_return_sequences": choices,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    for choices, beams in ((12, 12), (12, 24), (24, 24))
}


def likest(texts: list[str], _: list[float]) -> str:
    """The one with the highest mean chrF against all."""
    return max(texts, key=lambda text: sum(CHRF.sentence_score(text, [other]).score for other in texts))


def main(model_folder: str, folder: str, *names: str) -> None:
    sources, references = (
        (Path(folder) / f"val.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder).eval()
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))

    def translate(name: str, options: dict[str, object], choose: Choose) -> dict[str, object]:
        torch.manual_seed(0)
        start, outputs = time.process_time(), [""] * len(sources)
        for first in tqdm(range(0, len(order), ROWS), name):
            rows = order[first : first + ROWS]
            encoded = tokenizer([sources[row] for row in rows], return_tensors="pt", padding=True)
            encoded = {key: encoded[key] for key in ("input_ids", "attention_mask")}
            written = model.generate(**encoded, **options, max_new_tokens=2 * encoded["input_ids"].shape[1] + 10)
            found = [0.0]
            if options.get("output_scores"):
                scores = model.compute_transition_scores(written.sequences, written.scores, written.beam_indices)
                written, found = written.sequences, scores.sum(1).tolist()
            texts = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
            each = len(texts) // len(rows)
            for index, row in enumerate(rows):
                those = slice(index * each, (index + 1) * each)
                outputs[row] = choose(texts[those], found[those])
        seconds = time.process_time() - start
        bleu = sacrebleu.corpus_bleu(outputs, [references]).score
        chrf = sacrebleu.corpus_chrf(outputs, [references]).score
        return {"way": name, "bleu": round(bleu, 2), "chrf": round(chrf, 2), "seconds": round(seconds, 1)}

    kinds: list[tuple[Ways, Choose]] = [(BEAMS, lambda texts, _: texts[0]), (SAMPLED, likest), (BY_BLEU, least_risk)]
    ways = {name: (options, choose) for kind, choose in kinds for name, options in kind.items()}
    if unknown := [name for name in names if name not in ways]:
        sys.exit(f"{unknown[0]}: no way; these are known: {', '.join(ways)}")
    results = [translate(name, *ways[name]) for name in names or ways]
    about = environment(torch.device("cpu"), 1) | {"command": ["python", *sys.argv]}
    whole = {"model": model_folder, "weights": weights(Path(model_folder)), "environment": about, "results": results}
    print(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
