"""The demonstration's recipe: valid, and for the corpus that the grammar writes."""

from pathlib import Path

from demo.grammar import write
from training.corpus import read
from training.recipe import dump, parse

RECIPE = Path(__file__).parents[2] / "demo" / "recipe.yaml"


def test_it_is_valid_and_survives_being_written_down(tmp_path):
    recipe = parse([str(RECIPE)])
    (tmp_path / "again.yaml").write_text(dump(recipe), encoding="utf-8")
    again = parse([str(tmp_path / "again.yaml")])
    assert again.identity() == recipe.identity() and dump(again) == dump(recipe)


def test_it_reads_every_sentence_of_the_grammar(tmp_path):
    parts = write(tmp_path / "grammar", count=1000, held_out=20)
    data = parse([str(RECIPE), "--data.path", str(tmp_path / "grammar")]).data
    for role, pairs in zip(("train", "validation", "test"), parts, strict=True):
        chunks = list(read(data, role))
        for column, language in {"source": "english", "target": "german"}.items():
            read_back = [text for chunk in chunks for text in chunk[column]]
            assert read_back == [getattr(pair, language) for pair in pairs]
