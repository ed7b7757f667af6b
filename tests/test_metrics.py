"""What a run reports: scores against sacreBLEU's own command line of functions, logs that survive a kill, pictures."""

import json

import matplotlib.image
import numpy as np
import pytest
import sacrebleu

from tests import tiny_runs
from training import metrics

REFERENCES = ["Der Hund läuft schnell.", "Eine Frau liest ein Buch im Park.", "Zwei Männer arbeiten."]
ALIKE = {"ein Hund": -2.0, "ein großer Hund im Park": -3.0, "ein großer Hund in dem Park": -3.5, "Park": -9.0}
OUTPUTS = ["der Hund läuft schnell.", "Eine Frau liest ein Buch in dem Park.", "Zwei Männer arbeiten."]


def test_scores_are_sacrebleus_with_signatures():
    scores = metrics.translation_scores(OUTPUTS, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert scores["bleu_lowercase"] == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], lowercase=True).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert scores["bleu"] < scores["bleu_lowercase"]
    assert "case:mixed" in scores["bleu_signature"] and "tok:13a" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_lowercase_signature"]
    assert scores["exact_match"] == pytest.approx(100 / 3)
    assert metrics.translation_scores(REFERENCES, REFERENCES)["bleu"] == pytest.approx(100)


def test_groups_are_scored_apart():
    groups = metrics.grouped_scores(OUTPUTS, REFERENCES, ["bank", None, "bat"])
    assert {name: (values["rows"], values["exact_match"]) for name, values in groups.items()} == {
        "any group": (2, 50.0),
        "bank": (1, 0.0),
        "bat": (1, 100.0),
    }
    assert metrics.grouped_scores(OUTPUTS, REFERENCES, [None, "", None]) == {}


def test_of_several_translations_that_of_least_risk_is_taken():
    """The one that is most like all, each as often as it is probable: what few beams agree on, not a lone favourite."""
    alike = ["Ein Mann fährt Rad.", "Ein Mann fährt auf einem Rad.", "Ein Mann fährt auf seinem Rad."]
    alone = "Jemand radelt."
    assert metrics.least_risk([alone, *alike], [-4.0, -4.1, -4.1, -4.1]) == alike[1]
    assert metrics.least_risk([alone, *alike], [-4.0, -40.0, -40.0, -40.0]) == alone, "the others hardly count"
    assert metrics.least_risk([alone, *alike], [-400.0, -401.0, -440.0, -440.0]) == alone, "none of them is 0"
    assert metrics.least_risk([*alike, alone, alone, alone], [-4.0] * 6) == alone, "as often as it is there"
    gains = [
        sum(sacrebleu.sentence_bleu(text, [other]).score * np.exp(0.2 * score) for other, score in ALIKE.items())
        for text in ALIKE
    ]
    assert metrics.least_risk([*ALIKE], [*ALIKE.values()]) == [*ALIKE][int(np.argmax(gains))]
    assert metrics.least_risk(["", ""], [-1.0, -2.0]) == ""


def test_a_log_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path):
    log = metrics.Log(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        log.write("train", step=step, loss=1 / step)
    with open(log.path, "a", encoding="utf-8") as file:
        file.write('{"event": "train", "st')
    log.truncate(2)
    log.write("train", step=3, loss=0.5)
    lines = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 0.5)]
    assert metrics.read(tmp_path / "absent.jsonl") == []


def test_tensorboard_shows_what_the_log_holds(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 4}, trackers=["tensorboard"])
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    shown = events.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run"))
    shown.Reload()
    losses = {event.step: event.value for event in shown.Scalars("loss")}
    assert losses == pytest.approx(tiny_runs.losses(tmp_path / "run")) and len(losses) == 4
    assert {"learning_rate", "gradient_norm", "evaluation/loss", "evaluation/bleu"} <= set(shown.Tags()["scalars"])


def test_the_curves_are_red_and_blue(tmp_path):
    lines = [{"event": "train", "step": step, "loss": 5 - step / 10} for step in range(30)]
    metrics.draw(lines, tmp_path / "one.png")
    lines += [{"event": "evaluation", "step": step, "loss": 5 - step / 12, "bleu": step} for step in (10, 20)]
    metrics.draw(lines, tmp_path / "two.png")
    one, two = (matplotlib.image.imread(tmp_path / name)[..., :3] for name in ("one.png", "two.png"))

    def drawn(image, colour):
        return int((abs(image - colour).sum(axis=2) < 0.1).sum())

    assert drawn(one, (1, 0, 0)) > 50 and drawn(two, (1, 0, 0)) > 50
    assert drawn(two, (0, 0, 1)) > drawn(one, (0, 0, 1)) + 50
    assert two.shape[1] > one.shape[1], "the score has a panel of its own"


@pytest.mark.parametrize("parts", [3, 5, 60])
def test_intervals_hold_the_mean_in_95_of_100_cases(parts):
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        counts = rng.integers(50, 150, parts)
        values = np.stack([(2.0 + rng.normal(0, 0.3, parts)) * counts, counts], 1)
        sums, whole = metrics.resampled(values), values.sum(0)
        low, high = metrics.likely(sums[:, 0] / sums[:, 1], whole[0] / whole[1], parts)
        held += low <= 2.0 <= high
    assert 175 <= held <= 199
    assert metrics.likely(metrics.resampled(np.array([3.0])), 3.0, 1) is None


def test_intervals_of_translations():
    references = [f"the {word} is by the river bank" for word in ("trout", "letter", "north", "account")] * 10
    outputs = [text if number % 4 else text.replace("river", "old") for number, text in enumerate(references)]
    scores = metrics.translation_scores(outputs, references) | metrics.translation_intervals(outputs, references)
    for name in ("bleu", "chrf", "exact_match"):
        low, high = scores[f"{name}_interval"]
        assert low < scores[name] < high and high - low > 1
    assert scores["exact_match"] == 75


def test_intervals_of_translations_stay_within_what_a_score_can_be():
    references = ["a man rides a red bicycle down the hill", "two dogs play in the deep snow"] * 2
    found = metrics.translation_intervals([references[0], "x", "y", "z"], references)
    assert found["bleu_interval"][0] == 0.0 < found["bleu_interval"][1] <= 100.0


def test_intervals_of_few_parts_end_where_scores_do():
    drawn = [0.2, 1.02, 1.4, 1.5]
    assert metrics.likely(drawn, 1.1, 2)[0] == 0.0  # widened by 9, it would be below
    assert metrics.likely(drawn, 1.1, 2, least=1.0)[0] == 1.0
    assert metrics.likely([95.0, 99.0, 100.0], 98.0, 2, most=100.0)[1] == 100.0
