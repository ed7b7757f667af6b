"""The command line: what cannot be done is said in one line, before anything is written."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.benchmarks.tiny import run


def test_roofline_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "roofline") == []
    assert "GFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("trian", "did you mean train?"),
        ("train --shape decodr", "did you mean decoder?"),
        ("train --peer lama", "did you mean llama?"),
        ("train --peer nothing.here:build", "No module named"),
        ("train --peer nanogpt=nowhere", "give nanogpt=PATH"),
        ("train --shape tiny-decoder --peer bert", "is for encoder shapes"),
        ("embed --shape tiny-decoder", "embed is for encoder shapes"),
        ("train --shape tiny --width 15", "heads=2 must divide width=15"),
        ("train --shape tiny --batch 0 --precision fp8", "batch=0 must be at least 1; precision='fp8' must be one of"),
        ("train --bogus 3", "unrecognized arguments: --bogus"),
        ("train --rounds many", "invalid int value"),
        ("train --rounds 0", "--rounds 0 must be at least 1"),
        ("generate --num-beams 0", "--num-beams 0 must be at least 1"),
        ("calls --shape tiny-encoder", "calls is for decoder and seq2seq shapes"),
        ("scaling --values 3 4", "along one --axis"),
        ("generate --shape tiny-decoder --new-tokens 16", "leave no room for a prompt"),
        ("end-to-end", "needs --recipe"),
        ("end-to-end --recipe nowhere.yaml", "there is no such recipe"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
