"""Reports: the README says what the records say."""

import json
import re
from pathlib import Path


def test_the_readme_says_what_the_records_say() -> None:
    root = Path(__file__).parents[2]
    paths = root.glob("benchmarks/records/*/benchmark.json")
    records = {path.parent.name: json.loads(path.read_text()) for path in paths}
    rows = re.findall(
        r"^\| \[(.+?)\]\(benchmarks/records/(\w+)/benchmark\.json\) \| (.+?) \| ([\d.]+)× \| (?:([\d.]+)×)? *\|$",
        (root / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 10
    for label, folder, peer, speed, memory in rows:
        (ratio,) = (
            result["ratios"][peer]
            for result in records[folder]["results"]
            if f"{result['name'] or result['kind']}, {result['title']}" == label
        )
        assert f"{ratio['speed']['median']:.2f}" == speed, label
        assert memory == (f"{ratio['memory']:.2f}" if "memory" in ratio else ""), label
