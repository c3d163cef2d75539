"""The links of docs/equations.md lead to the lines that they name.

    python tests/test_equations.py      # writes today's line numbers into the page
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/equations.md"
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./(\w+\.py)#L(\d+)\)")        # name, file, line


def line_of(name, file):
    """Return the number of the first line with a tag ("# Eq. 1") or a definition ("lm.LM")."""
    word = re.escape(name.rpartition(".")[2])
    pattern = (rf"^ +\S.*{re.escape(name)}(?!\d)" if name.startswith("#") else
               rf"^(def|class) {word}\b|^{word} =")
    lines = (ROOT / file).read_text().splitlines()
    return next((n for n, line in enumerate(lines, 1) if re.search(pattern, line)), None)


def test_links_lead_to_the_lines():
    links = LINK.findall(PAGE.read_text())
    assert len(links) > 30
    wrong = [(name, file, n) for name, file, n in links if line_of(name, file) != int(n)]
    assert not wrong, f"{wrong}: python tests/test_equations.py corrects the page"


if __name__ == "__main__":
    PAGE.write_text(LINK.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{line_of(m[1], m[2])})",
                             PAGE.read_text()))
