"""The notebook, the page and the talk hold the walkthrough; the page's JavaScript computes what attention.py does."""

import base64
import html as html_text
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchvision.transforms.v2.functional import center_crop, resize

import common
import lecture.page as page_maker
from data.shapes import load_shapes
from robust.corruptions import corrupt
from vit import classifier_from_checkpoint

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
NODE = shutil.which("node")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium to open the page with")
needs_node = pytest.mark.skipif(not NODE, reason="no node to run the page's JavaScript with")
needs_extras = pytest.mark.skipif(not all(map(find_spec, ("markdown_it", "latex2mathml", "pygments"))),
                                  reason="markdown-it-py, latex2mathml, pygments: dev extras")


# --- the notebook ---------------------------------------------------------------------------------

def test_the_notebook_has_all_prose_and_every_cell_once_before_what_is_said_of_its_picture():
    cells = list(page_maker.notebook_cells())
    code = [text for kind, text in cells if kind == "code"]
    assert sorted(code) == sorted([*page_maker.code_cells().values(), page_maker.FIRST_CELL])
    prose = "".join(text for kind, text in cells if kind == "markdown")
    assert prose == re.sub(page_maker.PICTURE, "", (ROOT / "lecture/WALKTHROUGH.md").read_text())
    for name in re.findall(page_maker.PICTURE, (ROOT / "lecture/WALKTHROUGH.md").read_text()):
        at = cells.index(("code", page_maker.code_cells()[name[1]]))
        assert cells[at + 1][1].lstrip().startswith("*")


def test_the_cells_run_one_after_another_as_a_notebook_runs_them(tmp_path, monkeypatch):
    """The cheap ones, in one namespace, as text: nothing is left indented or unnamed."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr("sys.argv", ["walkthrough.py", "--out_dir", str(tmp_path)])
    names, code = {"__name__": "__main__"}, page_maker.code_cells()
    for name in ("", "projection", "gram", "hero", "pcp"):
        exec(compile(code[name], f"<cell {name}>", "exec"), names)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"projection", "gram", "hero", "pcp"}


def test_the_committed_notebook_is_woven_from_what_stands_here_and_was_executed():
    book = json.loads((ROOT / "lecture/walkthrough.ipynb").read_text())
    expected = [text.strip() for _, text in page_maker.notebook_cells()]
    assert ["".join(cell["source"]) for cell in book["cells"]] == expected
    drawn = [cell for cell in book["cells"] if cell["cell_type"] == "code" and "save(figure" in "".join(cell["source"])]
    for cell in drawn[1:]:                                              # the first defines save
        assert any("image/png" in output.get("data", {}) for output in cell["outputs"])
    assert not any(output["output_type"] == "error" for cell in drawn for output in cell["outputs"])


# --- the network in JavaScript --------------------------------------------------------------------

# (reading, lambda, n, layers): lambda from 0 to infinity, n from 1 to 12
SETTINGS = [("released", 4, 4, [0]), ("released", 0, 3, [0]), ("released", 0.05, 5, [0]), ("released", 0.7, 2, [0]),
            ("released", 1.5, 6, [0]), ("released", 4, 12, [0]), ("released", 20, 1, [0]), ("released", torch.inf, 7, [0]),
            ("paper", 0, 2, [0]), ("paper", 0.3, 4, [0]), ("paper", 2, 8, [0]), ("paper", 4, 12, [0]),
            ("paper", torch.inf, 4, [0]), ("admm", 0, 12, [0]), ("admm", 0.1, 3, [0]), ("admm", 1, 9, [0]),
            ("admm", 4, 4, [0]), ("admm", torch.inf, 5, [0]), ("released", 4, 4, [1, 3]), ("admm", 0.5, 2, [0, 1, 2, 3])]


def scenes():
    """Twenty pictures (20, 3, 32, 32) in [0, 1]: clean, corrupted, noise, black."""
    images = load_shapes("test", 16).images
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(3, 3, 32, 32, generator=random)
    spoilt = [corrupt(images[8 + i:9 + i], kind, 3, index=torch.tensor([i]))
              for i, kind in enumerate(("fog", "gaussian_noise", "contrast", "pixelate", "jpeg_compression", "frost"))]
    return torch.cat([images[:10] / 255, *spoilt, noise, torch.zeros(1, 3, 32, 32)])


def javascript(code, *names):
    """A script that has the page's data and the named files of lecture/web, and then runs code."""
    data = dict(networks=page_maker.networks(), **{"page-data": page_maker.page_data()})
    files = "".join((ROOT / f"lecture/web/{name}.js").read_text() for name in names)
    return (f"const stored = {json.dumps(data)};\nconst document = {{getElementById: id => "
            f"({{textContent: JSON.stringify(stored[id])}})}};\n{files}\n{code}")


def in_node(code, *names):
    done = subprocess.run([NODE], input=javascript(code, *names), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def in_chromium(html, code, folder):
    """What code, run in the page, gave to show(); the console has to stay empty."""
    show = 'const show = x => document.body.insertAdjacentHTML("beforeend", `<pre id="shown">${x}</pre>`);'
    script = f"<script>(async () => {{ {show} {code} }})();</script></body>"
    (folder / "page.html").write_text(html.replace("</body>", script))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--test-type", "--virtual-time-budget=600000", "--dump-dom",
               "--enable-logging=stderr", "--window-size=1280,807", f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said                               # a request would break the page's own policy
    return json.loads(html_text.unescape(re.findall(r'<pre id="shown">(.*?)</pre>', done.stdout, re.S)[-1]))


# Runs every scene with every setting and keeps each 61st number of S, K2, L, from another one on each time.
PROBE = """
const pixels = PIXELS, settings = SETTINGS, found = [], times = [];
const thin = (x, start) => x.filter((_, i) => i % 61 === start % 61);
pixels.forEach((image, i) => settings.forEach(([form, lambd, n_iter, layers], j) => {
  const begin = performance.now();
  const {logits, steps} = network.run("rpc", image, {form, lambd: lambd ?? Infinity, n_iter, layers});
  if (j === 0) times.push(performance.now() - begin);
  found.push({logits, steps: steps.map(({S, K2, L}) => [S, K2, L].map(x => thin(x, i + 20 * j)))});
}));
const others = ["softmax", "symmetric"].map(name => pixels.map(image => network.run(name, image).logits));
const result = JSON.stringify({found, others, times: times.sort((a, b) => a - b)});
"""


def half_model(name, **config):
    """A shipped network with its weights rounded to 16 bits, in float64."""
    checkpoint = common.load(ROOT / f"weights/shapes_{name}.pt")
    stored = {key: x for key, x in checkpoint["model_config"].items() if key not in ("n_iter", "lambd", "form")}
    checkpoint["model_config"] = {**stored, **config}
    checkpoint["model"] = {key: w.half().float() for key, w in checkpoint["model"].items()}
    return classifier_from_checkpoint(checkpoint).double().requires_grad_(False)


def check_network(result, capsys):
    """Compare what PROBE found with attention.py: within 1e-4 of the largest number of each array."""
    images, worst, found = scenes().double(), 0.0, iter(result["found"])
    traces = {}
    for j, (form, lambd, n_iter, layers) in enumerate(SETTINGS):
        pap = dict(form=form, lambd=float(lambd), n_iter=n_iter)
        model = half_model("rpc", rpc_layers=tuple(layers), pap=pap)
        x = model.embed(images)
        for block in model.blocks[:layers[0]]:
            x = block(x)
        block = model.blocks[layers[0]]
        traces[j] = model(images), block.attn.trace(block.norm1(x))
    for i in range(len(images)):
        for j in range(len(SETTINGS)):
            got, (logits, trace) = next(found), traces[j]
            pairs = [(logits[i], got["logits"])]
            assert len(got["steps"]) == len(trace) == SETTINGS[j][2]
            for step, arrays in zip(trace, got["steps"]):
                start = (i + 20 * j) % 61
                pairs += [(step[name][i].flatten(), (start, x)) for name, x in zip(("S", "K2", "L"), arrays)]
            for expected, x in pairs:
                largest = expected.abs().max().clamp_min(1e-6)
                if isinstance(x, tuple):
                    expected, x = expected[x[0]::61], x[1]
                worst = max(worst, ((expected - torch.tensor(x)).abs().max() / largest).item())
    for name, logits in zip(("softmax", "symmetric"), result["others"]):
        expected = half_model(name)(images)
        worst = max(worst, ((torch.tensor(logits) - expected).abs().max() / expected.abs().max()).item())
    times = result["times"]
    with capsys.disabled():
        print(f"\n20 scenes x 20 settings: {worst:.1e} of the largest number; an image takes {times[0]:.1f} ms at best, "
              f"{times[len(times) // 2]:.1f} ms in the middle")
    assert worst < 1e-4
    assert times[0] < 50 or os.getloadavg()[0] > os.cpu_count()         # a busy machine times nothing


def probe():
    settings = json.dumps([(form, None if lambd == torch.inf else lambd, *rest) for form, lambd, *rest in SETTINGS])
    pixels = json.dumps([[round(x, 7) for x in image.flatten().tolist()] for image in scenes()])
    return PROBE.replace("PIXELS", pixels).replace("SETTINGS", settings)


@needs_node
def test_in_node_the_network_computes_what_attention_py_does(capsys):
    check_network(in_node(probe() + "console.log(result);", "network"), capsys)


@needs_chromium
@needs_extras
def test_in_a_browser_the_network_computes_what_attention_py_does(page, tmp_path, capsys):
    check_network(in_chromium(page, probe() + "show(result);", tmp_path), capsys)


@needs_node
def test_the_attack_keeps_to_the_budget_and_to_pixels_between_0_and_1_and_its_margin_falls():
    pixels = torch.cat([torch.zeros(1000), torch.ones(1000), torch.rand(1072, generator=torch.Generator().manual_seed(0))])
    found = in_node(f"""
        const pixels = Float32Array.from({json.dumps(pixels.tolist())}), found = [];
        for (const eps of [0, 1.5 / 255, 8 / 255]) {{
          const runs = [0, 0, 1].map(seed => {{
            const search = new SquareAttack(pixels, eps, seed), asked = [];
            for (let query = 0; query < 200; query++) {{
              const x = search.propose();
              asked.push(Math.max(...x.map((xi, i) => Math.abs(xi - pixels[i]))), Math.max(...x), -Math.min(...x));
              search.tell(margin([1, x.reduce((a, b, i) => a + b * Math.cos(i), 0)], 0));
            }}
            return {{asked, margins: search.margins, best: [...search.best]}};
          }});
          found.push(runs);
        }}
        console.log(JSON.stringify(found));""", "network", "damage", "attack")
    for eps, (first, again, other) in zip((0, 1.5 / 255, 8 / 255), found):
        for run in (first, other):
            asked = torch.tensor(run["asked"]).view(-1, 3)
            assert (asked <= torch.tensor([eps, 1, 0]) + 1e-6).all()
            assert run["margins"] == sorted(run["margins"], reverse=True)
            assert (run["margins"][-1] < run["margins"][0]) == (eps > 0)
            assert (torch.tensor(run["best"]) - pixels).abs().max() <= eps + 1e-6
        assert first == again and (eps == 0 or first != other)


@needs_node
def test_a_picture_of_ones_own_is_resized_as_the_evaluations_do():
    photo = (load_shapes("test", 1, size=96).images[0, :, :67]).contiguous()            # 67 high, 96 wide
    rgba = torch.cat([photo, torch.full((1, 67, 96), 255)]).permute(1, 2, 0).flatten().tolist()
    for picture, width, height in ((photo, 96, 67), (photo[:, :20, :20], 20, 20)):      # smaller, larger
        rgba = torch.cat([picture, torch.full((1, height, width), 255)]).permute(1, 2, 0).flatten().tolist()
        found = in_node(f"const work = resized({rgba}, {width}, {height}); let now; while (!(now = work.next()).done); "
                        "console.log(JSON.stringify([...now.value]));", "damage")
        expected = center_crop(resize(picture, [32], 3, antialias=True), [32, 32])      # 3: bicubic
        assert (torch.tensor(found) * 255 - expected.flatten()).abs().max() < 1.01


@needs_node
def test_damage_stays_between_0_and_1_and_repair_brings_the_picture_back():
    paint = "0123" * 16
    found = in_node(f"""const pixels = new Float32Array(3072).map((_, i) => i % 256 / 255), none = "0".repeat(64);
        console.log(JSON.stringify([["noise", 1, "{paint}"], ["fog", 0.5, none], ["noise", 0, none], ["noise", 0, "{paint}"]]
          .map(([kind, amount, paint]) => [...damaged(pixels, {{kind, amount, paint}})])));""", "network", "damage")
    noisy, fog, same, painted = torch.tensor(found).view(4, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5)     # by patch
    pixels = (torch.arange(3072) % 256 / 255).view(3, 8, 4, 8, 4).permute(1, 3, 0, 2, 4)
    assert torch.stack([noisy, fog]).min() >= 0 and torch.stack([noisy, fog]).max() <= 1
    assert torch.equal(same, pixels) and fog.std() < pixels.std()
    assert torch.equal(painted[:, 0], pixels[:, 0]) and not torch.equal(painted[:, 1], pixels[:, 1])
    assert (painted[:, 2] == 0).all() and (painted[:, 3] == 1).all()


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
    return page_maker.page()


@needs_extras
def test_the_page_fetches_nothing_is_small_and_every_picture_and_control_has_words(page):
    assert len(page.encode()) < 3e6 and "default-src 'none'" in page
    for tag, attrs in Tags(re.sub(r"<script.*?</script>", "", page, flags=re.S)).found:
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:")) or tag == "a", (tag, attrs)
        assert tag != "img" or len(attrs["alt"]) > 10
        if tag in ("input", "select"):
            assert re.search(rf"<label[^>]*>[^<]+<{tag}[^>]* id=\"{attrs['id']}\"", page), attrs
    for name in re.findall(page_maker.PICTURE, (ROOT / "lecture/WALKTHROUGH.md").read_text()):
        assert page.count(f'"{name[0]}"') == 1


@needs_extras
def test_formulas_are_mathml_code_stays_code_titles_are_escaped_and_links_go_to_base(monkeypatch):
    text = ("## 1 < 2 & <b>3</b>\n\n$$\\frac{a}{b}$$ and $c_d$, `$no$` [file](../vit.py) [site](https://x.org) "
            "[part](#part-1)\n\n```python\nx = '$y$'\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    html = page_maker.to_html(text)
    assert html.count("<math") == 2 and "<mfrac>" in html and "<code>$no$</code>" in html and "$y$" in html
    assert "file" in html and "vit.py" not in html and 'href="https://x.org"' in html and 'href="#part-1"' in html
    assert '<div class="wide"><table>' in html and "@@" not in html
    assert 'href="https://h.org/b/vit.py">file</a>' in page_maker.to_html(text, "https://h.org/b/")
    monkeypatch.setattr(page_maker, "sections", lambda: [text, "## other\n"])
    whole = page_maker.page()
    assert "<title>1 &lt; 2 &amp; &lt;b&gt;3&lt;/b&gt;</title>" in whole
    assert '<a href="#part-0">1 &lt; 2 &amp; &lt;b&gt;3&lt;/b&gt;</a>' in whole


def test_the_scenes_of_the_page_are_the_test_scenes_to_the_last_bit():
    data = page_maker.page_data()
    split = load_shapes("test", 40)
    for scene, text, label in zip(page_maker.SCENES, data["scenes"], data["labels"]):
        assert base64.b64decode(text) == bytes(split.images[scene].flatten().tolist())
        assert label == split.labels[scene] and data["classes"] == split.classes
    assert sorted(data["labels"]) == list(range(10))                    # a scene of each shape


# (scene, lambda, n, reading, layer) that are looked into; the patch is number 27, in row 4, column 4
STATES = [(0, 1.5, 3, "released", 0), (3, torch.inf, 4, "paper", 2), (5, 0.0, 2, "admm", 1), (7, 0.2, 5, "released", 0)]


def check_what_is_shown(state, seen):
    """Token, step, layer, lambda, unit and scale: each number beside the same one of attention.py."""
    scene, lambd, n, form, layer = state
    model = half_model("rpc", rpc_layers=(layer,), pap=dict(form=form, lambd=lambd, n_iter=n))
    images = load_shapes("test", page_maker.SCENES[scene] + 1).images[-1:].double() / 255
    x = model.embed(images)
    for block in model.blocks[:layer]:
        x = block(x)
    attn, x = model.blocks[layer].attn, model.blocks[layer].norm1(x)
    (_, k, v), steps = attn.project(x), attn.trace(x)
    size, at = (lambda t: t.abs().sum((1, 3))[0]), 1 + 27
    maps, residual, entropy = [[], [], [], []], [], []
    for step in steps:
        S, K2, left = step["S"], step["K2"], k - step["S"] - step["L"]
        A = (K2 @ K2.mT / 32 ** 0.5).softmax(-1)
        received = A.mean(1)[0].fill_diagonal_(0).mean(0)
        longest = size(k).max()
        for row, values in zip(maps, (size(S) / longest, size(left) / longest, received, A.mean(1)[0, at])):
            row += [values[1:].mean().item(), values[at].item()]
        residual.append((left.norm() / k.norm()).item())
        entropy.append(torch.special.entr(A).sum(-1).mean().item())
    found = [float(x) for label in seen["maps"] for x in re.findall(r"\d\.\d+", label.split(":", 1)[1])]
    assert found == pytest.approx(sum(maps, []), abs=6e-5)
    for label, expected in zip(seen["curves"], (residual, entropy)):
        assert [float(x) for x in re.findall(r"\d+\.\d+", label)] == pytest.approx(expected, abs=6e-4)
    shown = "∞" if lambd == torch.inf else f"{lambd:g}"
    assert seen["words"].startswith(f"Step {n} in layer {layer + 1}, λ = {shown}, {form}")
    assert f"residual {residual[-1]:.2f} of |K|, entropy {entropy[-1]:.2f} nats" in seen["words"]
    assert f"row 4, column 4 gives itself {100 * maps[3][-1]:.0f} % of its attention" in seen["words"]
    assert ("S is empty" in seen["meaning"]) == (lambd == torch.inf)
    assert ("S takes everything" in seen["meaning"]) == (lambd == 0)
    percents = [int(x) for x in re.findall(r"(\d+) %", seen["bars"])][::2]
    assert percents == pytest.approx((100 * model(images).softmax(-1)[0]).tolist(), abs=0.51)


@needs_node
def test_in_node_what_the_page_shows_of_a_setting_is_what_attention_py_gives():
    states = [dict(scene=scene, lambd=None if lambd == torch.inf else lambd, n_iter=n, form=form, layers=[layer])
              for scene, lambd, n, form, layer in STATES]
    found = in_node(f"""
        const data = JSON.parse(document.getElementById("page-data").textContent), breathe = () => {{}};
        const ask = (...of) => {{ const work = network.start(...of); let now; while (!(now = work.next()).done); return now.value; }};
        (async () => {{
          const found = [];
          for (const state of {json.dumps(states)}) {{
            const now = {{...state, lambd: state.lambd ?? Infinity, network: "rpc", kind: "noise", amount: 0, paint: "0".repeat(64), temperature: 1}};
            const pixels = Float32Array.from(atob(data.scenes[state.scene]), c => c.charCodeAt(0) / 255);
            const seen = await lookInside(now, pixels);
            const label = values => `: ${{(sumOf(values) / 64).toFixed(4)}} ${{values[27].toFixed(4)}}`;
            const rows = [column => column.S, column => column.left, column => received(column.A), column => patches(j => looks(column.A, 28, j))];
            found.push({{words: sentence(seen, 27), meaning: meaning(seen), maps: rows.flatMap(row => seen.columns.map(column => label(row(column)))),
              bars: [...seen.answer].map(p => `${{percent(p)}}, ${{percent(p)}}`).join(),
              curves: [seen.residuals, seen.entropies].map(values => values.map(x => x.toFixed(3)).join())}});
          }}
          console.log(JSON.stringify(found));
        }})();""", "network", "damage", "inside")
    for state, seen in zip(STATES, found, strict=True):
        check_what_is_shown(state, seen)


@needs_node
def test_the_slider_of_lambda_goes_from_0_to_infinity_and_back():
    places = in_node("console.log(JSON.stringify(Array.from({length: 1001}, (_, p) => [fromSlider(p), toSlider(fromSlider(p))])"
                     ".map(([x, p]) => [x === Infinity ? 1e9 : x, p])));", "inside")
    values = [x for x, _ in places]
    assert values[0] == 0 and values[-1] == 1e9 and values[1] == 0.01 and values[-2] == 100
    assert values == sorted(values)
    assert [p for _, p in places] == pytest.approx(range(1001), abs=1.1)


LOOK = """
  const seen = [], states = STATES;
  const wait = () => new Promise(done => setTimeout(done, 50));
  for (const state of states) {
    const seed = "&seed=" + (1 + seen.length);
    location.hash = state + seed;
    for (let i = 0; i < 400 && !document.documentElement.dataset.live?.endsWith(seed); i++) await wait();
    const labels = (box, tag) => [...document.querySelectorAll(`${box} ${tag}`)].map(x => x.getAttribute("aria-label"));
    seen.push({words: document.getElementById("words").textContent, meaning: document.getElementById("meaning").textContent,
      bars: document.getElementById("bars").getAttribute("aria-label"), maps: labels("#maps", "canvas"), curves: labels("#curves", "svg"),
      lambda: document.getElementById("lambd-value").value, link: document.documentElement.dataset.live});
  }
  show(JSON.stringify(seen));
"""


@needs_chromium
@needs_extras
def test_in_a_browser_a_link_sets_the_page_and_what_it_says_is_what_attention_py_gives(page, tmp_path):
    links = [f"#try&scene={scene}&lambd={lambd if lambd < torch.inf else 'Infinity'}&n_iter={n}&form={form}&layers={layer}"
             for scene, lambd, n, form, layer in STATES]
    found = in_chromium(page, LOOK.replace("STATES", json.dumps(links)), tmp_path)
    for state, link, seen in zip(STATES, links, found, strict=True):
        check_what_is_shown(state, seen)
        assert seen["lambda"] == ("∞" if state[1] == torch.inf else f"{state[1]:g}")
        standard = {"scene=0", "n_iter=4", "form=released", "layers=0"}
        assert set(link.replace("=0.0", "=0").split("&")) - standard <= set(seen["link"].split("&"))


ATTACK = """
  const wait = ms => new Promise(done => setTimeout(done, ms)), $ = id => document.getElementById(id);
  let last = performance.now(), longest = 0;
  const tick = setInterval(() => { longest = Math.max(longest, performance.now() - last); last = performance.now(); }, 1);
  while (!document.documentElement.dataset.live) await wait(20);
  longest = 0;
  $("start").click();
  while (!/query [1-9]\\d/.test($("duel").textContent)) await wait(20);
  $("stop").click();
  while (!$("verdict").textContent) await wait(20);
  show(JSON.stringify({longest, duel: $("duel").textContent, verdict: $("verdict").textContent}));
"""


@needs_chromium
@needs_extras
def test_in_a_browser_the_attack_runs_in_slices_and_stops(page, tmp_path, capsys):
    found = in_chromium(page, ATTACK, tmp_path)
    with capsys.disabled():
        print(f"\nthe page was busy for {found['longest']:.0f} ms at most")
    assert "One image and one seed rank nothing" in found["verdict"]
    assert all(name in found["duel"] for name in ("softmax", "symmetric", "RPC"))
    assert found["longest"] < 500                           # 10 to 30 where nothing else runs


# Slides that overflow, and text under 24 px, at the window's size; and blocks of the page that are cut.
FIT = """
  const wait = ms => new Promise(done => setTimeout(done, ms)), found = [];
  while (!document.documentElement.dataset.live) await wait(20);
  const slides = document.querySelectorAll(".talk > section").length;
  for (let i = 0; i < slides; i++) {
    const slide = document.querySelector(".shown"), words = [...slide.querySelectorAll("h2, p, label, span, text")];
    const sizes = words.filter(x => x.getBoundingClientRect().width).map(x => parseFloat(getComputedStyle(x).fontSize) *
      (x.ownerSVGElement ? x.ownerSVGElement.getBoundingClientRect().width / x.ownerSVGElement.viewBox.baseVal.width : 1));
    found.push([slide.id, slide.scrollWidth - slide.clientWidth, slide.scrollHeight - slide.clientHeight,
      parseFloat(getComputedStyle(slide.querySelector("h2")).fontSize), Math.min(...sizes)]);
    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "PageDown", bubbles: true}));
  }
  show(JSON.stringify([innerWidth, innerHeight, found]));
"""


@needs_chromium
@needs_extras
def test_slides_fit_the_window_and_can_be_read_from_the_last_row(tmp_path):
    width, height, found = in_chromium(page_maker.slides(), FIT, tmp_path)
    assert (width, height) == (1280, 720)
    assert len(found) == 2 + (ROOT / "lecture/slides.md").read_text().count("\n## ")
    assert [name for name, *_ in found][:3] == ["slide-1", "try", "attack"]
    for name, wide, high, title, least in found:
        assert wide <= 0 and high <= 0 and title >= 40 and least >= 23.5, name


def test_without_the_extras_a_line_names_the_packages(tmp_path):
    code = ("import sys; sys.modules['pygments'] = sys.modules['nbformat'] = None; import common, lecture.page as p; "
            f"sys.argv = ['page', '--out_dir', {str(tmp_path)!r}, *sys.argv[1:]]; common.run(p.main)")
    for flag, names in (([], "markdown-it-py latex2mathml pygments"), (["--notebook"], "nbformat nbclient ipykernel")):
        done = subprocess.run([sys.executable, "-c", code, *flag], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 1 and f"pip install {names}" in done.stderr and len(done.stderr.splitlines()) == 1
