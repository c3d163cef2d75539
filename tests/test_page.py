"""Notebook, page and slides contain the lecture; the live network equals attention.py."""

import base64
import builtins
import functools
import html as html_text
import io
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision.transforms.v2.functional import center_crop, resize

import common
import kpca
from attention import layer_inputs
from data.shapes import load_shapes
from processes import finish, run_in, start
from robust.patches import noisy_patches
from runs import refused
from studies import arms
from studies.stats import paired_t
from vit import classifier_from_checkpoint

for package in ("markdown_it", "latex2mathml", "pygments"):
    pytest.importorskip(package)
import lecture.page as page_maker  # noqa: E402: this import needs the packages

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text(encoding="utf-8")
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
NODE = shutil.which("node")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
needs_node = pytest.mark.skipif(not NODE, reason="no node")


def test_committed_notebook_has_all_cells_executed():
    woven = list(page_maker.notebook_cells())
    prose = "".join(text for kind, text in woven if kind == "markdown")
    for text in (text for kind, text in woven if kind == "markdown"):
        assert text.count("<details>") == text.count("</details>")
    assert prose == re.sub(page_maker.PICTURE, "", TEXT)
    cells = json.loads(page_maker.read("lecture/walkthrough.ipynb"))["cells"]
    assert ["".join(cell["source"]) for cell in cells] == [text.strip() for _, text in woven]
    for cell in [cell for cell in cells if "pictures.draw_" in "".join(cell["source"])]:
        assert any("image/png" in output.get("data", {}) for output in cell["outputs"])
    hidden = [cell["metadata"].get("jupyter", {}).get("outputs_hidden", False) for cell in cells]
    assert hidden == [kind == "answer" for kind, _ in woven] and sum(hidden) == 7


def test_a_slide_of_one_paragraph_has_a_board():
    """The last paragraph stands below a formula or a table; it is not taken from an empty board."""
    split = page_maker.board_and_sentence
    assert split("$$a$$\n\nA sentence.") == ("$$a$$", "A sentence.")
    assert split("$$a$$") == ("$$a$$", "")
    assert split("- one\n\n- two") == ("- one\n\n- two", "")


def test_two_kinds_of_page_are_an_error():
    assert "not allowed with argument" in refused(page_maker, "--slides --live")


@functools.cache
def stored():
    return json.dumps({"networks": page_maker.networks(), "page-data": page_maker.page_data()})


def in_node(code, *names):
    """Return the result of JavaScript code that runs after the named files of lecture/web."""
    files = "".join(page_maker.read(f"lecture/web/{name}.js") for name in names)
    element = "({textContent: JSON.stringify(stored[id])})"
    script = (f"const stored = {stored()};\nconst document = {{getElementById: id => {element}}};\n"
              f"{files}\n(async () => {{ {code} }})()"
              ".then(found => console.log(JSON.stringify(found)));")
    done = subprocess.run([NODE], input=script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def in_chromium(html, code, folder, width=None):
    """Return the result of JavaScript code in the page; the console must stay empty.

    width: of a frame around the page, in pixels; None: the page fills the window.
    """
    show = ("found => parent.document.body.insertAdjacentHTML('beforeend', "
            "`<pre id=\"shown\">${JSON.stringify(found)}</pre>`)")
    helpers = ("const wait = ms => new Promise(done => setTimeout(done, ms));"
               "const $ = id => document.getElementById(id);")
    script = f"<script>(async () => {{ {helpers} {code} }})().then({show});</script></body>"
    html = html.replace("</body>", script)
    if width:                               # no window is as narrow as a phone
        html = (f'<!doctype html><body><iframe width="{width}" height="800" style="border: 0" '
                f'srcdoc="{html_text.escape(html)}"></iframe></body>')
    (folder / "page.html").write_text(html, encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--test-type",
               "--no-first-run", "--disable-background-networking", "--disable-quic",
               "--disable-component-update", "--disable-sync", "--virtual-time-budget=600000", "--dump-dom", "--enable-logging=stderr",
               "--window-size=1280,807", f"--user-data-dir={folder / 'profile'}",
               (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said                   # a request would break the page's own policy
    shown = re.findall(r'<pre id="shown">(.*?)</pre>', done.stdout, re.S)[-1]
    return json.loads(html_text.unescape(shown))


def traced(name, images, **config):
    """Return logits, (q, k, v) and steps of the first PAP layer, with 16-bit weights in float64."""
    checkpoint = common.load(ROOT / f"weights/shapes_{name}.pt")
    stored = {key: x for key, x in checkpoint["model_config"].items()
              if key not in ("n_iter", "lambd", "form")}
    checkpoint["model_config"] = {**stored, **config}
    checkpoint["model"] = {key: w.half().float() for key, w in checkpoint["model"].items()}
    model = classifier_from_checkpoint(checkpoint).double().requires_grad_(False)
    attn, x = layer_inputs(model, images.double())[config.get("rpc_layers", [0])[0]]
    return model(images.double()), attn.project(x), attn.trace(x)


# (variant, lambda, n, layers), one for each picture
SETTINGS = [("released", 4, 4, [0]), ("released", 0.1, 4, [1, 3]), ("paper", 1.5, 1, [0]),
            ("admm", 4, 12, [0]), ("admm", 1e9, 4, [1, 3])]


def pap_of(form, lambd, n_iter):
    return dict(form=form, lambd=torch.inf if lambd == 1e9 else float(lambd), n_iter=n_iter)


@needs_node
def test_live_network_equals_attention_py():
    """Logits, S, K2 and L of every step agree within 1e-4 of the largest number."""
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = torch.cat([torch.zeros(1, 3, 32, 32), noise, load_shapes("test", 3).images / 255])
    found = in_node(f"""
        const short = x => Array.from(x, xi => Number(xi.toPrecision(7)));
        return {json.dumps(images.flatten(1).tolist())}.map((image, i) => {{
          const [form, lambda, n_iter, layers] = {json.dumps(SETTINGS)}[i];
          const lambd = lambda === 1e9 ? Infinity : lambda;
          const {{logits, steps}} = network.run("rpc", image, {{form, lambd, n_iter, layers}});
          return [logits, ["softmax", "symmetric"].map(name => network.run(name, image).logits),
                  steps.map(step => Object.values(step).map(short))];
        }});""", "network")
    worst, plain = 0, [traced(name, images)[0] for name in ("softmax", "symmetric")]
    for i, (got, others, steps) in enumerate(found):
        *how, layers = SETTINGS[i]
        logits, _, trace = traced("rpc", images[i:i + 1], rpc_layers=tuple(layers),
                                  pap=pap_of(*how))
        pairs = [(logits, got), *((of[i], x) for of, x in zip(plain, others))]
        for step, arrays in zip(trace, steps, strict=True):
            pairs += [(step[name], x) for name, x in zip(("S", "K2", "L"), arrays, strict=True)]
        for expected, x in pairs:
            largest = expected.abs().max().clamp_min(1e-6)
            difference = (expected.flatten() - torch.tensor(x)).abs().max() / largest
            worst = max(worst, difference.item())
    assert worst < 1e-4


@needs_node
def test_live_robust_pca_equals_kpca():
    """S of one step agrees within 1e-5 of the largest number, on ten pictures, four damaged."""
    images = load_shapes("test", 10).images / 255
    images[:4], _ = noisy_patches(images[:4], patch=4)
    found = in_node(f"""
        return {json.dumps(images.flatten(1).tolist())}.map(image => {{
          const inside = [], pass = network.start("rpc", image, {{}}, inside, null);
          while (!pass.next().done);
          return Array.from(robustPca(inside[0].k));
        }});""", "network", "robust_pca")
    _, (_, k, _), _ = traced("rpc", images)
    centred = k - k.mean(2, keepdim=True)
    for keys, S in zip(centred, found, strict=True):
        expected = torch.stack([kpca.pcp(head, max_iter=1)[1] for head in keys]).flatten()
        assert (torch.tensor(S) - expected).abs().max() < 1e-5 * expected.abs().max()


@needs_node
def test_perfect_s_and_tokens_left_out():
    """Perfect S holds the whole painted keys; pixels that are left out change no answer."""
    image = load_shapes("test", 1).images[0] / 255
    other = image.clone()
    other[:, 4:8, 8:12] = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = in_node(f"""
        const of = (name, x, setting) => network.run(name, x, setting);
        return {json.dumps([image.flatten().tolist(), other.flatten().tolist()])}.map(x => [
          network.names.map(name => of(name, x, {{left_out: [11]}}).logits),
          of("rpc", x, {{perfect: [11, 20]}}).steps.map(step => step.S)]);""", "network")
    (first, S), (second, _) = found
    assert torch.allclose(torch.tensor(first), torch.tensor(second), atol=1e-5)
    _, (_, k, _), _ = traced("rpc", image[None])
    wish = torch.zeros_like(k)
    wish[:, :, [11, 20]] = k[:, :, [11, 20]]
    assert torch.allclose(torch.tensor(S).double(), wish.flatten().expand(4, -1), atol=1e-4)


@needs_node
def test_live_attack_keeps_budget_and_lowers_margin():
    random = torch.rand(1072, generator=torch.Generator().manual_seed(0))
    pixels = torch.cat([torch.zeros(1000), torch.ones(1000), random])
    found = in_node(f"""
        const pixels = Float32Array.from({json.dumps(pixels.tolist())});
        return [[1.5, 0], [8, 0], [8, 0], [8, 1]].map(([eps, seed]) => {{
          const search = new SquareAttack(pixels, eps / 255, seed), asked = [];
          for (let query = 0; query < 60; query++) {{
            const x = search.propose(), far = x.map((xi, i) => Math.abs(xi - pixels[i]));
            asked.push([Math.max(...far), Math.max(...x), -Math.min(...x)]);
            search.tell(margin([1, x.reduce((a, b, i) => a + b * Math.cos(i), 0)], 0));
          }}
          return {{asked, margins: search.margins, best: [...search.best]}};
        }});""", "network", "damage", "attack")
    for eps, run in zip((1.5, 8, 8, 8), found):
        assert (torch.tensor(run["asked"]) <= torch.tensor([eps / 255, 1, 0]) + 1e-6).all()
        assert run["margins"] == sorted(run["margins"], reverse=True)
        best = torch.tensor(run["best"])
        margin = 1 - (best * torch.arange(3072).cos()).sum().item()
        assert run["margins"][-1] == pytest.approx(margin, abs=1e-3) and margin < run["margins"][0]
    assert found[1] == found[2] != found[3]                             # the seed decides


@needs_node
def test_own_picture_is_resized_as_in_evaluation():
    photo = load_shapes("test", 1, size=96).images[0]
    for picture in (photo[:, :67], photo[:, :20, :20]):
        _, height, width = picture.shape
        rgba = torch.cat([picture, torch.full((1, height, width), 255)])
        rgba = rgba.permute(1, 2, 0).flatten().tolist()
        found = in_node(f"const work = resized({rgba}, {width}, {height}); let now; "
                        "while (!(now = work.next()).done); "
                        "return [...now.value];", "damage")
        expected = center_crop(resize(picture, [32], 3, antialias=True), [32, 32])      # 3: bicubic
        assert (torch.tensor(found) * 255 - expected.flatten()).abs().max() < 1.01


# (scene, variant, lambda, n, layers)
STATES = [(3, "paper", 1e9, 4, [2]), (5, "admm", 0, 2, [1]), (7, "released", 0.2, 5, [0, 3])]
ASK = """
    globalThis.breathe = async () => {};
    globalThis.ask = async (...of) => {
      for (const pass = network.start(...of);;) {
        const {done, value} = pass.next();
        if (done) return value;
      }
    };"""


@needs_node
def test_s_on_paint_equals_attention_py():
    hit = torch.zeros(64, dtype=torch.bool)
    hit[[3, 9, 30, 44, 45, 60]] = True
    seen = in_node(ASK + f"""
        const now = {{scene: 0, kind: "noise", amount: 0, paint: "{"".join("01"[x] for x in hit)}",
                      lambd: 4, n_iter: 4, form: "released", layers: [0], temperature: 1}};
        const pixels = {json.dumps((load_shapes("test", 1).images / 255).flatten().tolist())};
        const seen = await glance(now, Float32Array.from(pixels));
        return {{pixels: [...seen.pixels], words: plain(seen, "abcdefghij")}};""",
                   "network", "robust_pca", "damage", "inside")
    S = traced("rpc", torch.tensor(seen["pixels"]).view(1, 3, 32, 32))[2][-1]["S"]
    S = S.abs().sum((1, 3))[0, 1:]
    on, off = (part.mean() / S.mean() for part in (S[hit], S[~hit]))
    assert f"{on:.2f} on paint, {off:.2f} elsewhere" in seen["words"]


@needs_node
def test_every_step_equals_attention_py():
    images = load_shapes("test", max(page_maker.SCENES) + 1).images[list(page_maker.SCENES)] / 255

    shown = in_node(ASK + f"""
        const images = {json.dumps(images.flatten(1).tolist())}, found = [];
        for (const [scene, form, lambda, n_iter, layers] of {json.dumps(STATES)}) {{
          const lambd = lambda === 1e9 ? Infinity : lambda, paint = "0".repeat(64);
          const setting = {{network: "rpc", kind: "fog", amount: 0, paint, lambd, n_iter, form}};
          const seen = await lookInside({{...setting, layers}}, images[scene]);
          const {{answer, residuals, entropies, columns}} = seen;
          const maps = columns.map(({{S, left, A}}) => [S, left, received(A),
            patches(j => looks(A, 28, j))].map(map => Array.from(map)));
          found.push({{answer: [...answer], residuals, entropies, maps}});
        }}
        return found;""", "network", "robust_pca", "damage", "inside")
    for (scene, *how, layers), seen in zip(STATES, shown, strict=True):
        image = images[scene:scene + 1]
        logits, (_, k, _), steps = traced("rpc", image, rpc_layers=tuple(layers), pap=pap_of(*how))
        longest = k.abs().sum((1, 3)).max()
        maps, residuals, entropies = [], [], []
        for step in steps:
            left = k - step["S"] - step["L"]
            A = (step["K2"] @ step["K2"].mT / 32 ** 0.5).softmax(-1)
            of_others = A.mean(1)[0] * (1 - torch.eye(65))
            maps.append(torch.stack([step["S"].abs().sum((1, 3))[0] / longest,
                                     left.abs().sum((1, 3))[0] / longest, of_others.mean(0),
                                     A.mean(1)[0, 28]])[:, 1:])
            residuals.append((left.norm() / k.norm()).item())
            entropies.append(torch.special.entr(A).sum(-1).mean().item())
        assert torch.allclose(torch.tensor(seen["maps"]).double(), torch.stack(maps), atol=2e-5)
        assert seen["residuals"] == pytest.approx(residuals, abs=1e-4)
        assert seen["entropies"] == pytest.approx(entropies, abs=1e-4)
        assert seen["answer"] == pytest.approx(logits.softmax(-1)[0].tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def page():
    return page_maker.page()


@needs_chromium
def test_guess_stroke_and_attack_update_the_page(page, tmp_path):
    visit = in_chromium(page, """
        const text = async different => {
          while (["", different].includes($("plain").textContent)) await wait(20);
          return $("plain").textContent;
        };
        const asked = [$("guess").hidden, $("plain").textContent,
                       $("map").checkVisibility({visibilityProperty: true})];
        document.querySelector("#guess button[value='smaller']").click();
        const first = await text(""), box = $("picture").getBoundingClientRect();
        const at = {clientX: box.left + 0.9 * box.width, clientY: box.top + 0.9 * box.height};
        $("picture").dispatchEvent(new PointerEvent("pointerdown", {...at, buttons: 1}));
        const second = await text(first);
        $("clean").click();
        const painted = [first, second, await text(second)], score = $("right").textContent;

        let clock = performance.now();
        performance.now = () => clock += 5;                 // virtual time stands while scripts run
        location.hash = "#try&eps=12";                      // a link that somebody prepared
        const found = document.documentElement.dataset;
        while (!found.live.endsWith("&eps=12&guess=none")) await wait(20);
        new MutationObserver(() => /Query [2-9]/.test($("verdict").textContent)
                             && $("stop").click())
          .observe($("verdict"), {subtree: true, childList: true});
        $("start").click();
        while (!$("verdict").textContent.startsWith("After")) await wait(20);
        const words = [...document.querySelectorAll("#duel .words")].map(x => x.textContent);
        const bars = [...document.querySelectorAll("#many .stored")].map(x => x.textContent);
        return {asked, painted, score, verdict: $("verdict").textContent, words, bars};""", tmp_path)
    first, second, third = visit["painted"]
    assert visit["asked"] == [False, "", False]             # nothing is said before the guess
    assert first.startswith("You guessed smaller. Six patches are noise")
    assert visit["score"] == "You were right 1 of 1."
    assert "Seven patches are noise" in second
    numbers = r"(\d\.\d\d) on paint, (\d\.\d\d) elsewhere"
    assert re.search(numbers, first)[0] != re.search(numbers, second)[0]
    assert third.startswith("Nothing is painted")
    fooled = ["is fooled" in part for part in visit["verdict"].split(",")]
    assert fooled == [" became " in words for words in visit["words"]]
    for name, bar in zip(page_maker.NETWORKS, visit["bars"], strict=True):
        mean, *_ = page_maker.truth()[name][12]
        assert f"{mean:.1f} % (" in bar


@needs_chromium
def test_slides_fit_window_with_readable_text(tmp_path):
    width, height, found = in_chromium(page_maker.slides(), """
        const found = [];
        while (!document.documentElement.dataset.live) await wait(20);
        for (const _ of document.querySelectorAll(".talk > section")) {
          const slide = document.querySelector(".shown");
          if (slide.id === "try") {                       // the slide after the guess is fuller
            slide.querySelector("#guess button").click();
            while (!$("plain").textContent) await wait(20);
            const next = [...slide.children].filter(x => x.checkVisibility())
              .map(x => x.getBoundingClientRect());
            const overlap = next.some((box, i) => i && box.top < next[i - 1].bottom - 1);
            if (overlap || next.at(-1).bottom > innerHeight) slide.id = "try overlaps";
          }
          const words = [...slide.querySelectorAll("h1, h2, p, li, label, span, text")];
          const zoom = svg => svg ?
            svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
          const sizes = words.filter(x => x.getBoundingClientRect().width)
            .map(x => parseFloat(getComputedStyle(x).fontSize) * zoom(x.ownerSVGElement));
          const wide = [slide, ...slide.querySelectorAll(".board .wide")];
          found.push([slide.id, Math.max(...wide.map(x => x.scrollWidth - x.clientWidth)),
            slide.scrollHeight - slide.clientHeight,
            parseFloat(getComputedStyle(slide.querySelector("h1, h2")).fontSize), Math.min(...sizes)]);
          const key = new KeyboardEvent("keydown", {key: "PageDown", bubbles: true});
          document.body.dispatchEvent(key);
        }
        return [innerWidth, innerHeight, found];""", tmp_path)
    assert (width, height) == (1280, 720)
    assert len(found) == page_maker.read("lecture/slides.md").count("\n## ")
    assert found[17][0] == "try" and found[28][0] == "attack"           # as TEACHING.md says
    for name, wide, high, title, least in found:
        assert wide <= 0 and high <= 0 and title >= 40 and least >= 23.5, name


@needs_chromium
def test_formulas_and_code_fit_a_phone(page, tmp_path):
    found = in_chromium(page, """
        while (!document.documentElement.dataset.live) await wait(20);
        const cut = [...document.querySelectorAll("pre, .formula")]
          .filter(x => x.scrollWidth > x.clientWidth).map(x => x.textContent.slice(0, 60));
        const boxes = [...document.querySelectorAll("#try input[type=checkbox]")]
          .map(x => x.getBoundingClientRect().height).filter(height => height);
        return {width: innerWidth, page: document.documentElement.scrollWidth, cut, boxes};
        """, tmp_path, width=390)
    assert found["page"] <= found["width"] == 390 and found["cut"] == []
    assert len(found["boxes"]) >= 2 and min(found["boxes"]) >= 24


@needs_chromium
def test_keyboard_paints_and_keeps_its_frame(page, tmp_path):
    found = in_chromium(page, """
        const box = $("picture"), copy = document.createElement("canvas");
        const context = copy.getContext("2d", {willReadFrequently: true});
        const pixel = () => {                       // the corner of the patch in row 4, column 5
          context.drawImage(box, 128, 96, 1, 1, 0, 0, 1, 1);
          return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const settled = async () => {
          const before = document.documentElement.dataset.live;
          while (document.documentElement.dataset.live === before) await wait(20);
        };
        while (!document.documentElement.dataset.live) await wait(20);
        const press = key => box.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        const before = pixel();
        box.focus();
        press("ArrowRight");
        const moved = [box.getAttribute("aria-label"), pixel()];
        press("Enter");
        await settled();
        const painted = [box.getAttribute("aria-label"), pixel(), box.getAttribute("role")];
        const levels = [...document.querySelectorAll("h1, h2, h3")].map(x => Number(x.tagName[1]));
        return {before, moved, painted, levels};""", tmp_path)
    assert found["moved"][0].endswith("position: row 4, column 5, not painted")
    assert found["painted"][0].endswith("position: row 4, column 5, painted")
    assert found["moved"][1] == found["painted"][1] == [255, 255, 255]  # the frame stays
    assert found["before"] != [255, 255, 255]
    assert found["painted"][2] == "application"
    levels = found["levels"]                                            # no level is left out
    assert levels[0] == 1 and all(b <= a + 1 for a, b in zip(levels, levels[1:]))


@needs_chromium
def test_attack_names_networks_that_were_wrong_before(page, tmp_path):
    found = in_chromium(page, """
        let clock = performance.now();
        performance.now = () => clock += 5;
        location.hash = "#try&paint=" + "3".repeat(60) + "0000&out=1";     // nearly all is white
        while (!document.documentElement.dataset.live?.includes("out=1")) await wait(20);
        const words = $("plain").textContent;
        new MutationObserver(() => /Query [2-9]/.test($("verdict").textContent)
                             && $("stop").click())
          .observe($("verdict"), {subtree: true, childList: true});
        $("start").click();
        while (!$("verdict").textContent.startsWith("After")) await wait(20);
        return {verdict: $("verdict").textContent, words,
                bars: [...document.querySelectorAll("#duel .words")].map(x => x.textContent)};
        """, tmp_path)
    assert "No layer attends to them" in found["words"]
    wrong = ["wrong before the attack" in part for part in found["verdict"].split(",")]
    assert any(wrong)
    assert wrong == ["wrong before the attack" in bar for bar in found["bars"]]


@needs_node
def test_guesses_have_answers_and_chosen_scene_is_described():
    found = in_node(ASK + """
        const data = JSON.parse(document.getElementById("page-data").textContent), painted = [];
        const bytes = text => Float32Array.from(atob(text), c => c.charCodeAt(0) / 255);
        const clean = data.scenes.map(bytes);
        const row = async (scene, brush, more) => glance({...STANDARD, scene, ...more,
          paint: paintWith(brush)}, clean[scene]);
        for (const [scene, brush] of ROUNDS) painted.push(await row(scene, brush, {}));
        const best = ({answer}) => answer.indexOf(Math.max(...answer)), kept = [];
        for (const scene of clean.keys()) {
          const [plain, perfect] = [await row(scene, "1", {}), await row(scene, "1", {perfect: 1})];
          kept.push(best(plain.answers.rpc) === best(perfect.answers.rpc));
        }
        const [start, perfect, out] = [{}, {perfect: 1}, {out: 1}].map(more => row(2, "1", more));
        const says = async seen => data.classes[best((await seen).answers.rpc)];
        return {larger: painted.map(({on, off}) => larger(on.S, off.S)), kept,
                says: [await says(start), await says(perfect), await says(out)],
                without: plain(await glance({...STANDARD, paint: NO_PAINT, perfect: 1}, clean[2]),
                               data.classes), areas: painted[0].areas, MEAN};""",
                    "network", "robust_pca", "damage", "inside", "start")
    assert sorted(set(found["larger"])) == ["larger", "smaller"]        # each guess has an answer
    assert found["says"] == ["triangle", "arrow", "triangle"]
    assert found["kept"].count(True) == 8 and "eight of these ten" in found["MEAN"]
    assert found["areas"]["real"] > 0.95 and found["areas"]["S"] < 0.5
    assert "no effect without paint" in found["without"]


def test_stored_accuracies_equal_rows_of_study():
    rows = arms.stored(arms.STUDIES["criterion"])
    for name, arm in {"softmax": "softmax", "symmetric": "symmetric", "rpc": "rpc4-l1"}.items():
        for eps, shown in page_maker.truth()[name].items():
            own = [float(row.top1) for row in rows if (row.arm, row.measure) ==
                   (arm, f"pgd {eps}/255") and row.seed in range(40, 45)]
            d = paired_t(own)
            assert len(own) == 5 and shown == pytest.approx([d.mean, d.low, d.high], rel=1e-3)


def test_pictures_suit_a_dark_page():
    """No large area is opaque and pale, and no colour of a legend is the page's text colour."""
    pale = re.compile(r"fill: #([d-e][0-9a-f])\1\1(?!; (?:fill-)?opacity)")
    for path in sorted((ROOT / "lecture/pictures").glob("*.svg")):
        text = path.read_text(encoding="utf-8")
        areas = re.findall(r'<g id="(?:PolyCollection|FillBetween|patch)_\d+">(.*?)</g>', text, re.S)
        found = [area for area in areas if pale.search(area)]
        if path.stem == "dense":                            # its legend shows the colours of pixels
            found = [area for area in found if "#dddddd" not in area]
            legend = re.search(r'<g id="legend_1">.*', text, re.S)[0]
            swatches = re.findall(r"fill: (\S+?)[;\"]", legend)
            assert "currentColor" not in swatches and len(set(swatches)) >= 6, swatches
        assert not found, path


def without_packages(words):
    """Block scipy and matplotlib, then run a command, as in README's environment."""
    for name in ["scipy", "matplotlib", *sys.modules]:
        if name.split(".")[0] in ("scipy", "matplotlib"):
            sys.modules[name] = None
    run_in(ROOT, words)


@pytest.mark.parametrize("command", ["page", "page --live", "page --slides", "page --notebook",
                                     "exercises"])
def test_lecture_needs_neither_scipy_nor_matplotlib(command, tmp_path):
    words = ["-m", *f"lecture.{command}".split()]
    if "page" in command:
        words += ["--out_dir", str(tmp_path)]
    code, _, err = finish(start(partial(without_packages, words), []))
    assert code == 0, err
    assert "page" not in command or len(list(tmp_path.iterdir())) == 1


def with_ascii_texts(words):
    """Run a command where a text whose encoding is not stated is ASCII, as in the C locale."""
    real = io.open

    def open_as_in_c(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None,
                     closefd=True, opener=None):
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "ascii"
        return real(file, mode, buffering, encoding, errors, newline, closefd, opener)

    io.open = builtins.open = open_as_in_c
    io.text_encoding = lambda encoding, stacklevel=2: encoding or "ascii"       # for Path
    run_in(ROOT, words)


def test_texts_are_read_as_utf_8(tmp_path):
    for command, expected in ((["page", "--out_dir", str(tmp_path)], 0), (["exercises", "7"], 1)):
        run = partial(with_ascii_texts, ["-m", f"lecture.{command[0]}", *command[1:]])
        code, out, err = finish(start(run, []))
        assert code == expected and "Unicode" not in out + err, err[-500:]
    assert "µ" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_notebook_goes_to_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT / "lecture/exercises")
    exec(page_maker.FIRST_CELLS[0], {})
    assert Path.cwd() == ROOT


def test_page_fetches_nothing_and_its_links_fit(page):
    assert len(page.encode()) < 3e6 and "default-src 'none'" in page
    written = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert set(re.findall(r"<(\w+)[^>]* (?:src|(?:xlink:)?href)=\"(?!#|data:)", written)) == {"a"}
    for tag, name in re.findall(r'<(input|select)[^>]* id="(.*?)"', written):
        assert re.search(rf'<label[^>]*>[^<]*<{tag}[^>]* id="{name}"', written), name
    for alt, _ in re.findall(page_maker.PICTURE, TEXT):
        assert page.count(f'"{alt}"') == 1
    parts = re.findall(r' id="([^"]+)"', page)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(parts)
    assert len(parts) == len(set(parts))


def test_scenes_of_page_are_test_scenes():
    data, split = page_maker.page_data(), load_shapes("test", 40)
    for scene, text, label in zip(page_maker.SCENES, data["scenes"], data["labels"], strict=True):
        assert base64.b64decode(text) == bytes(split.images[scene].flatten().tolist())
        assert label == split.labels[scene] and data["classes"] == split.classes
    assert sorted(data["labels"]) == list(range(10))                    # one scene of each shape
