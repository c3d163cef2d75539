"""The notebook, the page and the talk hold the walkthrough; the explorer shows what attention.py computes."""

import base64
import json
import random
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import common
import lecture.page as weave
from attention import FORMS, rpc_attention
from data.shapes import load_shapes
from robust.patches import corrupt_patches
from vit import classifier_from_checkpoint

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
EXTRAS = ("markdown_it", "latex2mathml", "pygments")
needs_extras = pytest.mark.skipif(not all(map(find_spec, EXTRAS)), reason=f"{', '.join(EXTRAS)}: dev extras")


# --- the notebook ---------------------------------------------------------------------------------

def test_the_notebook_has_all_prose_and_every_cell_once_before_what_is_said_of_its_picture():
    cells = list(weave.notebook_cells())
    code = [text for kind, text in cells if kind == "code"]
    assert sorted(code) == sorted([*weave.code_cells().values(), weave.FIRST_CELL])
    prose = "".join(text for kind, text in cells if kind == "markdown")
    assert prose == re.sub(weave.PICTURE, "", (ROOT / "lecture/WALKTHROUGH.md").read_text())
    for name in re.findall(weave.PICTURE, (ROOT / "lecture/WALKTHROUGH.md").read_text()):
        at = cells.index(("code", weave.code_cells()[name[1]]))
        assert cells[at - 1][0] == "markdown" and cells[at + 1][1].lstrip().startswith("*")


def test_the_cells_run_one_after_another_as_a_notebook_runs_them(tmp_path, monkeypatch):
    """The cheap ones, in one namespace, as text: nothing is left indented or unnamed."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr("sys.argv", ["walkthrough.py", "--out_dir", str(tmp_path)])
    names, code = {"__name__": "__main__"}, weave.code_cells()
    for name in ("", "projection", "gram", "hero", "pcp"):
        exec(compile(code[name], f"<cell {name}>", "exec"), names)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"projection", "gram", "hero", "pcp"}


def test_the_committed_notebook_is_woven_from_what_stands_here_and_was_executed():
    book = json.loads((ROOT / "lecture/walkthrough.ipynb").read_text())
    assert ["".join(cell["source"]) for cell in book["cells"]] == [text.strip() for _, text in weave.notebook_cells()]
    drawn = [cell for cell in book["cells"] if cell["cell_type"] == "code" and "save(figure" in "".join(cell["source"])]
    for cell in drawn[1:]:                                              # the first defines save
        assert any("image/png" in output.get("data", {}) for output in cell["outputs"])
    assert not any(output["output_type"] == "error" for cell in drawn for output in cell["outputs"])


# --- the explorer ---------------------------------------------------------------------------------

def test_the_explorer_holds_what_rpc_attention_gives_to_half_a_grey_level():
    data = json.loads(weave.explorer_data())
    maps = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(data["maps"]))), dtype=torch.uint8)
    shape = (len(data["images"]), len(data["forms"]), len(data["lambdas"]), data["steps"], 64 + 64 + 64 * 64)
    maps = maps.view(shape).float()
    assert shape[:4] == (4, 3, 8, 6) and len(data["curves"]) == 4 * 3 * 8 * 6
    model = classifier_from_checkpoint(common.load(ROOT / "weights/shapes_rpc.pt")).requires_grad_(False)
    draw = random.Random(0)
    for _ in range(50):
        i, f, j, s = (draw.randrange(n) for n in shape[:4])
        scene, damaged = weave.SCENES[i // 2], i % 2
        x = load_shapes("test", scene + 1).images[scene:] / 255
        x, _ = corrupt_patches(x, "noise", patch=4, n=6 * damaged)
        attn = model.blocks[0].attn
        _, k, v = attn.project(model.blocks[0].norm1(model.embed(x)))
        steps = []
        rpc_attention(k, v, n_iter=s + 1, lambd=data["lambdas"][j], **FORMS[data["forms"][f]], trace=steps)
        S, K2, L = (steps[-1][name] for name in ("S", "K2", "L"))
        token, other = draw.randrange(64), draw.randrange(64)
        scores = torch.einsum("hd,hjd->hj", K2[0, :, 1 + token], K2[0]) / k.shape[-1] ** 0.5
        attention = scores.softmax(1).mean(0)[1 + other]
        longest = k.abs().sum((1, 3)).max()
        got = maps[i, f, j, s]
        expected = (S[0, :, 1 + token].abs().sum() / longest, (k - S - L)[0, :, 1 + token].abs().sum() / longest,
                    attention.sqrt())
        for value, byte in zip(expected, (got[token], got[64 + token], got[128 + 64 * token + other])):
            assert abs(min(255 * value.item(), 255) - byte.item()) <= 0.51
        residual, _ = data["curves"][((i * 3 + f) * 8 + j) * 6 + s]
        assert residual == pytest.approx(((k - S - L).norm() / k.norm()).item(), abs=1e-3)


# --- the page -------------------------------------------------------------------------------------

class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page():
    return weave.page()


@needs_extras
def test_the_page_fetches_nothing_and_every_picture_and_control_has_words(page):
    tags = Tags(page).found
    for tag, attrs in tags:
        for name in ("src", "href"):
            here = attrs.get(name, "#").startswith(("#", "data:"))
            assert here or tag == "a", (tag, attrs)
        assert tag != "img" or len(attrs["alt"]) > 10
    assert sum(tag == "img" for tag, _ in tags) == (ROOT / "lecture/WALKTHROUGH.md").read_text().count("(pictures/")
    controls = [attrs["id"] for tag, attrs in tags if tag in ("input", "select")]
    assert len(controls) == 4 and all(re.search(rf"<label>[^<]+<\w+[^>]* id=\"{name}\"", page) for name in controls)
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / "lecture/WALKTHROUGH.md").read_text(), flags=re.S)
    formulas = len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", text, re.S))
    assert page.count("<math") == formulas > 15 and "@@" not in page
    visible = re.sub(r"<script.*?</script>|<style.*?</style>|<code.*?</code>|<math.*?</math>", "", page, flags=re.S)
    assert "$" not in visible and "](" not in visible


@needs_extras
def test_the_talk_is_the_page_with_a_section_a_slide(page):
    talk = weave.page(slides=True)
    assert talk.count("<section") == page.count("<section") == len(weave.sections())
    assert talk.replace((ROOT / "lecture/web/slides.js").read_text(), "") == page


@needs_extras
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium to open the page with")
def test_in_a_browser_the_sliders_change_the_pictures_without_an_error_or_a_request(page, tmp_path):
    probe = """<script>setTimeout(() => {
        const $ = name => document.getElementById("ex-" + name), seen = [];
        const look = () => seen.push([$("S").toDataURL().length, $("words").textContent]);
        look();
        const changes = [["step", 1], ["lambda", 7], ["form", "admm"], ["image", $("image").options[2].value]];
        for (const [name, value] of changes) {
            $(name).value = value; $(name).dispatchEvent(new Event("input")); look(); }
        $("S").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"})); look();
        document.body.textContent = JSON.stringify(seen); }, 2000);</script></body>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom",
               "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert "CONSOLE" not in done.stderr, done.stderr                    # a request would break the page's own policy
    assert "default-src 'none'" in page
    seen = json.loads(re.search(r"\[\[.*\]\]", done.stdout)[0])
    words = [text for _, text in seen]
    assert len(words) == 6 and len(set(words)) == 6 - (words[4] == words[3])
    assert words[0].startswith("Step 4, λ = 4, released") and words[3].startswith("Step 1, λ = 16, admm")
    assert "row 4, column 4" in words[4] and "row 4, column 5" in words[5]


def test_without_the_extras_a_line_names_the_package(monkeypatch):
    def absent(name):
        raise ImportError(name)
    monkeypatch.setattr(weave, "import_module", absent)
    for call, name in ((weave.page, "pygments"), (lambda: weave.write_notebook("x.ipynb"), "nbformat")):
        with pytest.raises(ValueError, match=rf"--(page|notebook) needs {name}.*: pip install -r requirements-dev.txt"):
            call()
