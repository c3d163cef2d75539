"""Notebook, page and slides contain the lecture; the live network equals attention.py."""

import base64
import functools
import html as html_text
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import center_crop, resize

import common
import kpca
from attention import FORMS, layer_inputs
from data.shapes import load_shapes
from models import load_classifier
from processes import finish, run_in, start
from robust.patches import noisy_patches
from studies import arms, perfect_s
from studies.stats import paired_t

for package in ("markdown_it", "latex2mathml", "pygments"):
    pytest.importorskip(package)
import lecture.page as page_maker  # noqa: E402: these imports need the packages
from lecture import animation  # noqa: E402

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text(encoding="utf-8")
CHROMIUM = next(filter(None, map(shutil.which, animation.BROWSERS)), None)
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


def in_chromium(html, code, folder, frames=None):
    """Return the result of JavaScript code in the page; the console must stay empty.

    frames: sizes (width, height) in pixels; the page is shown in a frame of each size, and the
    results are a list. None: the page fills the window of 1280 x 720.
    """
    helpers = ("const wait = ms => new Promise(done => setTimeout(done, ms));"
               "const $ = id => document.getElementById(id);"
               "const live = document.documentElement.dataset;"
               "const settled = async () => { while (!live.live) await wait(20); };"
               "const after = async act => { delete live.live; act(); await settled(); };")
    send = "found => parent.postMessage([Number(name), found], '*')"
    listen = """<script>
        const shown = [];
        addEventListener("message", ({data: [i, found]}) => {
          shown[i] = found;
          document.body.insertAdjacentHTML("beforeend", `<pre id="shown"></pre>`);
          document.body.lastChild.textContent = JSON.stringify(shown);
        });</script>"""
    script = f"<script>(async () => {{ {helpers} {code} }})().then({send});</script></body>"
    html = html.replace("</body>", script)
    if frames:
        (folder / "framed.html").write_text(html, encoding="utf-8")
        tags = [f'<iframe name="{i}" width="{width}" height="{height}" style="border: 0" '
                'src="framed.html"></iframe>' for i, (width, height) in enumerate(frames)]
        html = f"<!doctype html><body>{listen}{''.join(tags)}</body>"
    else:
        html = html.replace("<body>", f"<body>{listen}")
    (folder / "page.html").write_text(html, encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--test-type",
               "--no-first-run", "--disable-background-networking", "--disable-quic",
               "--disable-component-update", "--disable-sync", "--virtual-time-budget=600000",
               "--dump-dom", "--enable-logging=stderr", "--window-size=1280,807",
               f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said                   # a request would break the page's own policy
    shown = re.findall(r'<pre id="shown">(.*?)</pre>', done.stdout, re.S)[-1]
    found = json.loads(html_text.unescape(shown))
    return found if frames else found[0]


def traced(name, images, **config):
    """Return logits, (q, k, v) and steps of the first PAP layer, with 16-bit weights in float64."""
    checkpoint = common.load(ROOT / f"weights/shapes_{name}.pt")
    stored = {key: x for key, x in checkpoint["model_config"].items()
              if key not in ("n_iter", "lambd", "form")}
    checkpoint["model_config"] = {**stored, **config}
    checkpoint["model"] = {key: w.half().float() for key, w in checkpoint["model"].items()}
    model = load_classifier(checkpoint).double().requires_grad_(False)
    attn, x = layer_inputs(model, images.double())[config.get("rpc_layers", [0])[0]]
    return model(images.double()), attn.project(x), attn.trace(x)


# (variant, lambda, n, layers), one for each picture
SETTINGS = [("released", 4, 4, [0]), ("released", 0.1, 4, [1, 3]), ("paper", 1.5, 1, [0]),
            ("admm", 4, 12, [0]), ("admm", 1e9, 4, [1, 3])]


def pap_of(form, lambd, n_iter):
    return dict(form=form, lambd=torch.inf if lambd == 1e9 else float(lambd), n_iter=n_iter)


@needs_node
def test_live_network_equals_attention_py():
    """Logits, S, K2 and L of every step agree within 1e-5 of the largest number."""
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = torch.cat([torch.zeros(1, 3, 32, 32), noise, load_shapes("test", 8).images / 255])
    found = in_node(f"""
        const short = x => Array.from(x, xi => Number(xi.toPrecision(9)));
        return {json.dumps(images.flatten(1).tolist())}.map((image, i) => {{
          const [form, lambda, n_iter, layers] = {json.dumps(2 * SETTINGS)}[i];
          const lambd = lambda === 1e9 ? Infinity : lambda;
          const {{logits, steps}} = network.run("rpc", image, {{form, lambd, n_iter, layers}});
          return [logits, ["softmax", "symmetric"].map(name => network.run(name, image).logits),
                  steps.map(step => Object.values(step).map(short))];
        }});""", "network")
    worst, plain = 0, [traced(name, images)[0] for name in ("softmax", "symmetric")]
    for i, (got, others, steps) in enumerate(found):
        *how, layers = (2 * SETTINGS)[i]
        logits, _, trace = traced("rpc", images[i:i + 1], rpc_layers=tuple(layers),
                                  pap=pap_of(*how))
        pairs = [(logits, got), *((of[i], x) for of, x in zip(plain, others))]
        for step, arrays in zip(trace, steps, strict=True):
            pairs += [(step[name], x) for name, x in zip(("S", "K2", "L"), arrays, strict=True)]
        for expected, x in pairs:
            largest = expected.abs().max().clamp_min(1e-6)
            difference = (expected.flatten() - torch.tensor(x, dtype=torch.float64)).abs().max()
            worst = max(worst, (difference / largest).item())
    print(f"largest difference on ten pictures: {worst:.1e}")
    assert len(found) == 10 and worst < 1e-5


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
    """Perfect S equals the study's "own S elsewhere"; pixels left out change no answer."""
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
    _, (_, k, v), _ = traced("rpc", image[None])
    hit, trace = torch.zeros(1, 65, 1, dtype=torch.bool), []
    hit[:, [11, 20]] = True
    layer = SimpleNamespace(attn="rpc", pap=dict(n_iter=4, lambd=4.0, **FORMS["released"],
                                                 trace=trace))
    perfect_s.attend(perfect_s.OWN, hit, None, None, k, v, layer)
    wish = torch.stack([step["S"].flatten() for step in trace])
    assert torch.allclose(torch.tensor(S).double(), wish, atol=1e-4)


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


# In virtual time no time passes while scripts run, so the page's clock goes by calls.
CLOCK = "let clock = performance.now(); performance.now = () => clock += 5; await settled();"
FIND = """
    const visible = x => x.checkVisibility(), all = css => [...document.querySelectorAll(css)];
    const text = id => $(id).textContent;
    const answer = () => all("#answers figcaption b").at(-1).textContent;
    const keydown = (target, key) => target.dispatchEvent(
      new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    const attack = async (button, until) => {               // stop the attack if until() is true
      const observer = new MutationObserver(() => until() && $("stop").click());
      observer.observe($("verdict"), {subtree: true, childList: true});
      $("verdict").textContent = "";
      button.click();
      while (!text("verdict").startsWith("After")) await wait(20);
      observer.disconnect();
      return [text("verdict"), ...all("#duel .words").map(x => x.textContent)];
    };
    const few = () => /Query [2-9]/.test(text("verdict"));
    const link = async hash => after(() => { location.hash = hash; });"""


@needs_chromium
def test_live_page_in_a_browser(page, tmp_path):
    """Five rounds, the boxes, brush and keyboard, and three attacks, in one visit."""
    visit = in_chromium(page, CLOCK + FIND + """
        const shown = id => visible($(id)), found = {rounds: []};
        const focused = () => document.activeElement.textContent;
        found.start = [shown("guess"), text("plain"), shown("map"), shown("first"), shown("next")];
        for (const guess of ["smaller", "larger", "smaller", "near 0.5", "larger"]) {
          const button = document.querySelector(`#guess button[value="${guess}"]`);
          const round = {question: document.querySelector(".question").textContent};
          button.focus();
          await after(() => button.click());
          const areas = ["auc-S", "auc-real"].map(id => Number(text(id).split(" ")[1]));
          Object.assign(round, {said: text("plain"), score: text("right"), areas});
          round.focused = [focused()];
          found.rounds.push(round);
          if (!shown("next")) continue;
          $("next").focus();
          await after(() => $("next").click());
          round.focused.push(focused());
        }

        await after(() => $("first").click());
        found.boxes = [[text("plain"), answer(), text("mean")]];
        for (const id of ["perfect", "empty", "out"]) {
          await after(() => $(id).click());
          const ticked = ["perfect", "empty", "out"].filter(id => $(id).checked);
          found.boxes.push([ticked, answer(), text("mean")]);
        }
        await after(() => $("first").click());

        const picture = $("picture"), box = picture.getBoundingClientRect();
        const point = (kind, share, more) => picture.dispatchEvent(new PointerEvent(kind, {
          clientX: box.left + share * box.width, clientY: box.top + share * box.height, ...more}));
        await after(() => point("pointerdown", 0.9, {buttons: 1}));
        found.stroke = text("plain");
        await after(() => $("clean").click());
        await after(() => $("perfect").click());
        found.clean = text("plain");

        const copy = document.createElement("canvas");
        const context = copy.getContext("2d", {willReadFrequently: true});
        const look = () => {                        // the corner of the patch in row 4, column 5
          context.drawImage(picture, 128, 96, 1, 1, 0, 0, 1, 1);
          return [picture.getAttribute("aria-label"), [...context.getImageData(0, 0, 1, 1).data]];
        };
        await link("#try&guess=none");
        picture.blur();
        point("pointermove", 0.44);
        found.keyboard = [look()];
        picture.focus();
        keydown(picture, "ArrowRight");
        found.keyboard.push(look());
        await after(() => keydown(picture, "Enter"));
        found.keyboard.push(look());

        await link("#try");
        found.arrow = await attack(all(".clean-scene")[0], () => / became /.test(text("duel")));
        await link("#try&eps=12");
        found.attack = await attack($("start"), few);
        found.bars = all("#many .stored").map(x => x.textContent);
        await link("#try&paint=" + "3".repeat(60) + "0000&out=1");      // nearly all is white
        found.left_out = text("plain");
        return found;""", tmp_path)

    assert visit["start"] == [True, "", False, False, False]    # nothing is said before the guess
    questions, said, scores, areas, focused = (
        [turn[key] for turn in visit["rounds"]]
        for key in ("question", "said", "score", "areas", "focused"))
    assert all("larger there than elsewhere, or smaller?" in questions[i] for i in (0, 1, 2, 4))
    assert "the same noise" in questions[3] and "near 1 again, or near 0.5?" in questions[3]
    starts = ["smaller: right", "larger: wrong", "smaller: right", "near 0.5: right",
              "larger: right"]
    assert [words.split(". ")[0] for words in said] == [f"You guessed {start}" for start in starts]
    assert all("Six patches are noise" in words for words in said[:3])
    assert "One direction describes equal patches, so they belong to L" in said[3]
    assert areas[0] == [0.18, 0.99]
    assert all(rpc < 0.25 and robust > 0.95 for rpc, robust in areas[:3])
    assert abs(areas[3][1] - 0.5) < 0.1 and areas[4][0] > 0.6 and areas[4][1] < 0.5
    assert scores[1] == "You were right 1 of 2. " and "After five pictures" in scores[4]
    assert focused == [["next picture", "larger"], ["next picture", "larger"],
                       ["next picture", "near 1"], ["next picture", "larger"], ["first picture"]]

    first, *boxes = visit["boxes"]
    assert first[0].startswith("Six patches are noise. RPC says triangle") and first[2] == ""
    assert [box[:2] for box in boxes] == [[["perfect"], "triangle"], [["empty"], "arrow"],
                                          [["out"], "triangle"]]
    for number in ("+0.1 points (-0.8 to +1.0)", "88.7", "89.7", "77.2", "93.6"):
        assert all(number in mean for _, _, mean in boxes)
    assert "Seven patches are noise" in visit["stroke"]
    assert visit["clean"].startswith("Nothing is painted")
    assert "no effect without paint" in visit["clean"]
    before, moved, painted = visit["keyboard"]
    assert moved[0].endswith("position: row 4, column 5, not painted")
    assert painted[0].endswith("position: row 4, column 5, painted")
    assert before[1] != moved[1] == painted[1] == [255, 255, 255, 255]      # the frame stays

    verdict, *words = visit["attack"]
    assert ["is fooled" in part for part in verdict.split(",")] == [" became " in x for x in words]
    for name, bar in zip(page_maker.NETWORKS, visit["bars"], strict=True):
        mean, *_ = page_maker.truth()[name][12]
        assert f"{mean:.1f} % (" in bar
    assert "No layer attends to them" in visit["left_out"]
    assert visit["arrow"][1] == "arrow became star at query 5"


def clicks_of_teaching():
    """Return the clicks of TEACHING.md's minutes: [("slide", "18"), ("press", "larger"), ...]."""
    plan = page_maker.read("lecture/TEACHING.md").split("## Minute by minute")[1]
    rows = re.findall(r"^\| [\d.]+ \| ([\d, ]*) \| (.*) \|$", plan, re.M)
    rows += re.findall(r"^The page of the attack \(slide (\d+)\) (.*)", plan, re.M)
    steps = []
    for slides, text in rows:
        steps += [("slide", number) for number in re.findall(r"\d+", slides)]
        for word, number in re.findall(r'(?:[Pp]ress|tick) "(.*?)"|type (\d+), then Enter', text):
            steps.append(("slide", number) if number else ("press", word))
    return steps


@needs_chromium
def test_slides_and_clicks_of_teaching(tmp_path):
    """Follow TEACHING.md word by word at two sizes; each slide fits, and its text is readable."""
    sizes, steps = [(1280, 720), (1024, 768)], clicks_of_teaching()
    results = in_chromium(page_maker.slides(), f"{CLOCK} {FIND} const steps = {json.dumps(steps)};"
                          """
        const slides = all(".talk > section"), slide = () => document.querySelector(".shown");
        const inside = css => [...slide().querySelectorAll(css)].filter(visible);
        const press = key => keydown(document.activeElement, key);
        const place = () => [slides.indexOf(slide()) + 1, parseInt(location.hash.slice(1))];
        const found = {places: [], measured: [], steps: [], keys: []};
        found.size = [innerWidth, innerHeight];
        const measure = () => {
          const zoom = svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
          const size = x => parseFloat(getComputedStyle(x).fontSize) *
            (x.ownerSVGElement ? zoom(x.ownerSVGElement) : 1);
          const words = inside("h1, h2, h3, p, li, label, span, text, code, td, th, button");
          const wide = [slide(), ...inside(".board .wide")];
          const boxes = inside(":scope > *").map(x => x.getBoundingClientRect());
          found.measured.push({name: slide().id, title: size(inside("h1, h2")[0]),
            least: Math.min(...words.filter(x => x.getBoundingClientRect().width).map(size)),
            sides: Math.max(...wide.map(x => x.scrollWidth - x.clientWidth)),
            below: Math.max(slide().scrollHeight, ...boxes.map(box => box.bottom)) - innerHeight,
            overlap: boxes.some((box, i) => i && box.top < boxes[i - 1].bottom - 1)});
        };
        for (const _ of slides) {
          measure();
          found.places.push(place());
          press("PageDown");
        }

        const act = async (kind, word) => {
          if (kind === "slide") return [...word, "Enter"].forEach(press);
          const control = inside("button, label").find(x => x.textContent.trim().startsWith(word));
          const {bottom, right} = control.getBoundingClientRect();
          if (bottom > innerHeight || right > innerWidth) throw new Error(`${word} is outside`);
          if (word.startsWith("attack")) return;
          const target = control.querySelector("input") ?? control;
          target.focus();
          await after(() => target.click());
          measure();
        };
        for (const step of steps) {
          await act(...step);
          const areas = [text("auc-S"), text("auc-real")];
          const mean = visible($("mean")) && text("mean");
          found.steps.push({place: place(), answer: answer(), areas, mean});
        }

        await act("slide", "18");
        const keys = "PageDown PageUp ArrowRight ArrowLeft End Home 1 8 Enter".split(" ");
        for (const id of ["out", "scene", "brush", "picture"])
          for (const key of keys) {
            $(id).focus();
            press(key);
            found.keys.push(place()[0]);
          }
        await act("press", "erase all");
        found.erased = text("plain");
        if (innerHeight === 720) return found;              // the smaller size plays to the end
        while (visible($("next"))) {
          await act("press", "next");
          await act("press", inside("#guess button")[0].value);
        }
        found.score = text("right");
        press("End");
        found.attack = await attack($("start"), few);
        measure();
        return found;""", tmp_path, sizes)

    number, teaching = len(results[0]["places"]), page_maker.read("lecture/TEACHING.md")
    assert number == page_maker.read("lecture/slides.md").count("\n## ")
    areas = re.search(r"with AUC (0\.\d\d) and (0\.\d\d) in this scene", teaching).groups()
    ticks = re.findall(r'tick "([^"]+)": (\w+) (?:becomes (\w+))?', teaching)
    assert [tick for tick, *_ in ticks] == ["perfect S", "S empty", "leave out"]
    for size, found in zip(sizes, results, strict=True):
        assert found["size"] == list(size)
        assert found["places"] == [[i, i] for i in range(1, number + 1)]
        assert found["measured"][17]["name"] == "try"                   # as TEACHING.md says
        for one in found["measured"]:
            assert one["sides"] <= 0 and one["below"] <= 0 and not one["overlap"], (size, one)
            assert one["title"] >= 40 and one["least"] >= 23.5, (size, one)
        for (kind, word), step in zip(steps, found["steps"], strict=True):
            assert kind != "slide" or step["place"] == [int(word)] * 2
        done = dict(zip([word for _, word in steps], found["steps"]))
        assert done["larger"]["areas"] == [f"AUC {area}" for area in areas]
        for tick, before, then in ticks:
            assert done[tick]["answer"] == (then or before) and "+0.1 points" in done[tick]["mean"]
        assert found["keys"] == 4 * [19, 18, 19, 18, number, 1, 1, 1, 18]
        assert found["erased"].startswith("Nothing is painted")
    assert "After five pictures" in results[1]["score"] and "After" in results[1]["attack"][0]


@needs_chromium
def test_page_fits_a_phone(page, tmp_path):
    """Nothing is cut on a phone; wide pictures can be moved, and the page says so."""
    [found] = in_chromium(page, """
        await settled();
        document.querySelectorAll("details").forEach(x => { x.open = true; });
        const cut = [...document.querySelectorAll("pre, .formula")]
          .filter(x => x.scrollWidth > x.clientWidth).map(x => x.textContent.slice(0, 60));
        const boxes = [...document.querySelectorAll("#try input[type=checkbox]")]
          .map(x => x.getBoundingClientRect().height).filter(height => height);
        const pictures = [...document.querySelectorAll("p:has(> .drawn)")].map(x => [
          x.scrollWidth > x.clientWidth, getComputedStyle(x, "::before").content]);
        const page = document.documentElement.scrollWidth;
        return {width: innerWidth, page, cut, boxes, pictures};
        """, tmp_path, [(390, 800)])
    assert found["page"] <= found["width"] == 390 and found["cut"] == []
    assert len(found["boxes"]) >= 3 and min(found["boxes"]) >= 24
    assert len(found["pictures"]) == len(re.findall(page_maker.PICTURE, TEXT))
    assert all("swipe" in hint for wide, hint in found["pictures"] if wide)


SCENES = """
    const data = JSON.parse(document.getElementById("page-data").textContent);
    const pixels = text => Float32Array.from(atob(text), c => c.charCodeAt(0) / 255);
    const clean = data.scenes.map(pixels);"""


@needs_node
def test_noise_of_page_is_typical():
    """Print the mean AUCs over the page's ten scenes; the page's pattern is nearest to the mean."""
    found = in_node(SCENES + """
        const keysAndS = (scene, pattern) => {
          const inside = [], steps = [], noisy = damaged(scene, STANDARD, pattern);
          network.start("rpc", noisy, {}, inside, steps).next();                 // layer 0 only
          return [inside[0].k, steps.at(-1).S];
        };
        const score = S => auc(patches(i => size(S, i)), STANDARD.paint), patterns = [];
        for (let i = 1; i <= 20; i++)
          patterns.push(clean.map(scene => score(keysAndS(scene, i)[1])));
        const own = clean.map(scene => {
          const [K, S] = keysAndS(scene);
          return [score(S), score(robustPca(K))];
        });
        return {patterns, own, pattern: PATTERN};""",
                    "network", "robust_pca", "damage", "inside", "start")
    patterns, own = torch.tensor(found["patterns"]), torch.tensor(found["own"])
    rpc, robust = own.mean(0).tolist()
    print(f"AUC over ten scenes: RPC-Attention {rpc:.3f}, robust PCA {robust:.3f}")
    assert torch.equal(own[:, 0], patterns[found["pattern"] - 1]) and len(own) == 10
    assert (patterns.mean(1) - patterns.mean()).abs().argmin() == found["pattern"] - 1
    assert (own[:, 0] < 0.5).all() and (own[:, 1] > 0.9).all()
    said = f"mean AUC is {rpc:.2f} for RPC-Attention and {robust:.2f} for robust PCA"
    assert said in page_maker.read("lecture/web/live.html")


@needs_node
def test_chosen_scenes_are_as_the_page_says():
    """An empty S changes two answers, one of them in the first scene that is shown."""
    found = in_node(SCENES + """
        const answer = (scene, empty) => {
          const now = {...STANDARD, empty}, noisy = damaged(scene, now);
          const {logits} = network.run("rpc", noisy, settingOf(now));
          return logits.indexOf(Math.max(...logits));
        };
        return clean.map(scene => answer(scene, 0) === answer(scene, 1));""",
                    "network", "robust_pca", "damage", "attack", "inside", "start")
    assert found.count(False) == 2 and not found[2]
    assert "in two of the ten scenes" in page_maker.read("lecture/web/live.html")


def test_animation_is_small_and_has_all_frames():
    path = ROOT / "lecture/pictures/live.gif"
    with Image.open(path) as picture:
        assert picture.n_frames == len(animation.FRAMES)
        assert picture.size == (2 * animation.WIDTH, 2 * animation.HEIGHT)
    assert path.stat().st_size < 1e6


def test_stored_accuracies_equal_rows_of_study():
    rows = arms.stored(arms.STUDIES["criterion"])
    for name, arm in {"softmax": "softmax", "symmetric": "symmetric", "rpc": "rpc4-l1"}.items():
        for eps, shown in page_maker.truth()[name].items():
            own = [float(row.top1) for row in rows if (row.arm, row.measure) ==
                   (arm, f"pgd {eps}/255") and row.seed in range(40, 45)]
            d = paired_t(own)
            assert len(own) == 5 and shown == pytest.approx([d.mean, d.low, d.high], rel=1e-3)


def without_packages(words, packages):
    """Block packages, then run a command, as in an environment that lacks them."""
    for name in [*packages, *sys.modules]:
        if name.split(".")[0] in packages:
            sys.modules[name] = None
    run_in(ROOT, words)


@pytest.mark.parametrize("command", [
    "page", "page --live --site https://a.example/b --code https://c.example/d", "page --slides",
    "page --notebook", "exercises"])
def test_lecture_needs_neither_scipy_nor_matplotlib(command, tmp_path):
    words = ["-m", *f"lecture.{command}".split()]
    if "page" in command:
        words += ["--out_dir", str(tmp_path)]
    code, _, err = finish(start(partial(without_packages, words, ["scipy", "matplotlib"]), []))
    assert code == 0, err
    assert "page" not in command or len(list(tmp_path.iterdir())) == 1
    if "--site" in command:
        made = (tmp_path / "live.html").read_text(encoding="utf-8")
        assert '<a href="https://c.example/d">code</a>' in made
        assert '<meta property="og:image" content="https://a.example/b/live.png">' in made


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
