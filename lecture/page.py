"""Make a page, slides or a notebook from lecture/WALKTHROUGH.md: one file each.

    python -m lecture.page                   # out/walkthrough/index.html: text and live networks
    python -m lecture.page --slides          # out/walkthrough/slides.html: one picture per slide
    python -m lecture.page --live            # out/walkthrough/live.html: the live part, to embed
    python -m lecture.page --notebook        # out/walkthrough/walkthrough.ipynb, executed

All need markdown-it-py, latex2mathml and pygments; the notebook also needs nbformat,
nbclient, ipykernel and matplotlib. A reader's browser fetches nothing: the file contains the
weights of three networks, and lecture/web/network.js runs them. If you publish the files, add
--site and --code, and copy lecture/pictures/live.png beside the files: it is the preview picture.
"""

import base64
import html
import json
import os
import re
from pathlib import Path

import torch
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

import common
from data.shapes import SHAPES, load_shapes
from models import load_classifier

ROOT = Path(__file__).parents[1]
NETWORKS = ("softmax", "symmetric", "rpc")
SCENES = (35, 3, 0, 1, 2, 5, 8, 9, 10, 15)              # test scenes of the live page
PICTURE = re.compile(r"^!\[(.*?)\]\(pictures/(\w+)\.png\)\n", re.M)
BUDGETS = (1, 2, 4, 6, 8, 12)                           # of the attack, in 1/255
BOXES = ("as trained", "perfect S", "S empty", "left out")      # the boxes of the live page
DESCRIPTION = ("Does RPC-Attention find the noise? Paint noise on a picture, guess, and look: "
               "three small networks run in your browser.")
SCRIPTS = ("network", "robust_pca", "damage", "attack", "inside", "draw", "start", "live")
# The browser fetches nothing. The tests in a browser use eval.
POLICY = ("default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
          "script-src 'unsafe-inline' 'unsafe-eval'")
FIRST_CELLS = ["""\
# Once, in the repository's folder: pip install -r studies/requirements.txt
# In Colab, first clone the repository and go to its folder:
# !git clone <its address> rpc && pip install -q -r rpc/studies/requirements.txt
# %cd rpc
import os
from pathlib import Path

for folder in (Path.cwd(), *Path.cwd().parents):        # go to the repository's folder
    if (folder / "attention.py").exists():
        os.chdir(folder)
        break""", """\
import torch
from attention import layer_inputs, rpc_attention, symmetric_attention
from lecture import pictures


# RPC-Attention, a copy from attention.py: change its lines here
NAIVE_RPC""", """\
# The keys and values of layer 0 for eight scenes: is the result equal to rpc_attention?
attn, x = layer_inputs(pictures.network("rpc"), pictures.scenes(8)[0])[0]
_, k, v = attn.project(x)
(naive_rpc(k, v) - rpc_attention(k, v)).abs().max()"""]


def read(path):
    """Return the text of a file of this repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def sections():
    """Split lecture/WALKTHROUGH.md before each heading; return a list of texts."""
    return re.split(r"^(?=## )", read("lecture/WALKTHROUGH.md"), flags=re.M)


# --- the notebook ---------------------------------------------------------------------------------

def notebook_cells():
    """Yield (kind, text) per cell; the call that draws a picture stands for it.

    kind: "markdown", "code", or "answer", code whose output is closed until a reader opens it.
    """
    function = r"^def naive_rpc.*?\n    return L[^\n]*"
    naive = re.search(function, read("attention.py"), re.M | re.S)[0]
    for i, text in enumerate(sections()):
        # PICTURE has two groups, so the pieces are: text, alt, name, text, alt, name, text, ...
        pieces = re.split(PICTURE, text)
        before, details = without_opening(pieces[0])
        yield "markdown", before
        if i == 0:
            for code in FIRST_CELLS:
                yield "code", code.replace("NAIVE_RPC", naive)
        for name, after in zip(pieces[2::3], pieces[3::3]):
            kind = "answer" if details else "code"
            yield kind, f"pictures.draw_{name}()"
            # The <details> before the picture goes behind it, because a cell cannot end inside
            # <details>.
            after, details_of_next = without_opening(after)
            yield "markdown", details + after
            details = details_of_next


def without_opening(text):
    """Split off a <details> that begins just before a picture: (text, its opening or "").

    A cell cannot end inside <details>, so the opening stands behind the picture. Text between the
    opening and the picture belongs to the opening.
    """
    start = text.rfind("<details>")
    if start < 0 or "</details>" in text[start:]:
        return text, ""
    return text[:start], text[start:]


def write_notebook(path):
    """Write the notebook. Run its code only if the committed notebook lacks outputs for it."""
    try:
        import nbformat
    except ModuleNotFoundError as e:
        raise common.InputError(f"--notebook needs the package {e.name}, which is missing; run: "
                                "pip install nbformat nbclient ipykernel matplotlib") from e

    cells = []
    for i, (kind, text) in enumerate(notebook_cells()):
        if kind == "markdown":
            cell = nbformat.v4.new_markdown_cell(text.strip(), id=f"cell-{i}")
        else:
            cell = nbformat.v4.new_code_cell(text.strip(), id=f"cell-{i}")
        if kind == "answer":
            cell.metadata.update(collapsed=True, jupyter=dict(outputs_hidden=True))
        cells.append(cell)
    kernel = dict(name="python3", display_name="Python 3", language="python")
    book = nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel))
    committed = nbformat.read(ROOT / "lecture/walkthrough.ipynb", as_version=4).cells
    known = {cell.source: cell for cell in committed if cell.cell_type == "code"}
    code = [cell for cell in cells if cell.cell_type == "code"]
    if all(cell.source in known for cell in code):
        for cell in code:
            old = known[cell.source]
            cell.update(outputs=old.outputs, execution_count=old.execution_count)
    else:
        from nbclient import NotebookClient
        NotebookClient(book, timeout=600, record_timing=False,
                       resources=dict(metadata=dict(path=str(ROOT)))).execute()
    nbformat.write(book, path)


# --- data of the live page ------------------------------------------------------------------------

def text_of(tensor):
    """Return the bytes of a tensor in base64."""
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def networks():
    """Return {name: 16-bit weights with their names and sizes} for network.js."""
    stored = {}
    for name in NETWORKS:
        model = load_classifier(common.load(ROOT / f"weights/shapes_{name}.pt"))
        weights = model.state_dict()
        sizes = [(key, w.numel()) for key, w in weights.items()]
        numbers = torch.cat([w.flatten() for w in weights.values()])
        stored[name] = dict(tensors=sizes, half=text_of(numbers.half()), mean=model.config.mean,
                            std=model.config.std)
    return stored


def truth():
    """Return {network: {budget in 1/255: (mean, low, high)}}: accuracy in % under PGD.

    The numbers come from five networks of each kind and 1,000 scenes, from the study of equal cost;
    low and high are the ends of the 95 % interval over networks. `python -m lecture.pictures
    equal_cost` computes and stores them, so that the page needs no scipy.
    """
    stored = json.loads(read("lecture/pictures/numbers.json"))["equal_cost"]
    found = {name: {} for name in NETWORKS}
    for name in NETWORKS:
        for eps in BUDGETS:
            key = f"{name} pgd {eps}/255"
            found[name][eps] = [stored[f"{key} {end}"] for end in ("mean", "low", "high")]
    return found


def box_means():
    """Return what the boxes of the live page change on average, over 1,000 scenes with noise.

    contrast: (mean, low, high) of perfect S minus as trained, in points, over six networks.
    accuracy: {box: accuracy of the page's network in %}. `python -m lecture.pictures where`
    computes and stores the numbers.
    """
    stored = json.loads(read("lecture/pictures/numbers.json"))["where"]
    contrast = [stored[f"noise, own S elsewhere{end}"] for end in ("", " low", " high")]
    return dict(contrast=contrast, accuracy={box: stored[f"noisy scenes, {box}"] for box in BOXES})


def page_data():
    """Return scenes as bytes (3, 32, 32), labels, class names and accuracies for live.js."""
    split = load_shapes("test", max(SCENES) + 1)
    return dict(classes=list(SHAPES), truth=truth(), mean=box_means(),
                labels=split.labels[list(SCENES)].tolist(),
                scenes=[text_of(split.images[scene]) for scene in SCENES])


# --- Markdown to HTML -----------------------------------------------------------------------------

def with_formulas(text):
    """Replace the formulas of a Markdown text by MathML."""
    def mathml(match):
        block, inline = match.groups()
        if not block:
            return convert(inline, display="inline")
        pieces = re.split(r"\\qquad|\\quad", block)     # on a narrow screen, one below another
        formulas = " ".join(convert(piece.strip(), display="block") for piece in pieces)
        return f'\n\n<div class="wide formula">{formulas}</div>\n\n'

    code = r"(```.*?```|`[^`\n]*`)"
    formula = r"\$\$(.+?)\$\$|\$([^$\n]+)\$"
    parts = []
    for part in re.split(code, text, flags=re.S):
        if not part.startswith("`"):                    # code has no formulas
            part = re.sub(formula, mathml, part, flags=re.S)
        parts.append(part)
    return "".join(parts)


def figure(name, alt):
    """Return a picture of lecture/pictures as inline HTML: the SVG if there is one, or the PNG."""
    drawn = ROOT / f"lecture/pictures/{name}.svg"
    if not drawn.exists():
        data = base64.b64encode(drawn.with_suffix(".png").read_bytes()).decode()
        return f'<img class="drawn" alt="{alt}" src="data:image/png;base64,{data}">'
    not_drawn = r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>"
    svg = re.sub(not_drawn, "", drawn.read_text(encoding="utf-8"), flags=re.S)
    # Ids must be unique in the page; the pictures share only the letters, whose ids are DejaVu...
    before_id = r'(id="|url\(#|href="#)(?!DejaVu)'
    svg = re.sub(before_id, rf"\1{name}-", svg)
    return svg.replace("<svg ", f'<svg class="drawn" role="img" aria-label="{alt}" ', 1)


def to_html(text):
    """Return Markdown as HTML: formulas in MathML, pictures inline, links to files as text."""
    def coloured(code, language, _):
        return highlight(code, get_lexer_by_name(language or "text"), HtmlFormatter(nowrap=True))

    parser = MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    body = parser.render(with_formulas(text))
    body = re.sub(r'<img src="pictures/(\w+)\.png" alt="(.*?)" />',
                  lambda match: figure(match[1], match[2]), body)
    body = re.sub(r'<a href="(?!http|#)[^"]*">(.*?)</a>', r"\1", body)
    return re.sub(r"<table>.*?</table>", r'<div class="wide">\g<0></div>', body, flags=re.S)


def title_of(text):
    """Return the heading of a section as HTML."""
    return html.escape(text.splitlines()[0].lstrip("# "))


def anchor_of(text):
    """Return the anchor of a section as GitHub makes it: lower case, hyphens for spaces."""
    heading = text.splitlines()[0].lstrip("# ").lower()
    letters = re.sub(r"[^\w -]", "", heading)
    return letters.replace(" ", "-")


# --- the page and the slides ----------------------------------------------------------------------

def page():
    """Return the page as HTML: the title, the live networks, then all sections."""
    parts = [f'<section id="{anchor_of(text)}">\n{to_html(text)}</section>\n'
             for text in sections()]
    parts[0] = re.sub(r"<h1>.*?</h1>\n", "", parts[0], count=1)         # the title comes first
    title = f"<h1>{title_of(sections()[0])}</h1>\n"
    links = [("try", "Try it: paint, look at S"), ("attack", "Attack three networks")]
    links += [(anchor_of(text), title_of(text)) for text in sections()]
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in links)
    nav = f'<nav aria-label="sections"><ul>{items}</ul></nav>\n'
    beginning = "#" + anchor_of(sections()[0])
    return document(f"<main>\n{title}{live(beginning)}{nav}{''.join(parts)}</main>", SCRIPTS)


def slides():
    """Return the slides as HTML; a printed slide also shows the section that has its picture."""
    shown = []
    # The live part has two sections, and each is a slide: a network, and the attack.
    attack = '<section id="attack"'
    first, second = live("index.html").split(attack)
    parts = {"Live": first, "Live: attack": attack + second}
    for text in read("lecture/slides.md").split("\n## ")[1:]:
        title, _, body = text.partition("\n")
        body = body.strip()
        if title in parts:
            shown.append(parts[title])
            continue
        picture = re.search(PICTURE, text)
        notes = ""
        if picture:
            alt, name = picture.groups()
            said = text[picture.end():]
            section = next(part for part in sections() if f"pictures/{name}.png" in part)
            stage = f'<div class="stage">{figure(name, html.escape(alt))}</div>'
            notes = f'<aside class="notes">{to_html(PICTURE.sub("", section))}</aside>'
        else:
            board, said = board_and_sentence(body)
            stage = f'<div class="board">{to_html(board)}</div>'
        tag = "h2" if shown else "h1"               # the title slide
        shown.append(f'<section class="slide" id="slide-{len(shown) + 1}">\n<{tag}>'
                     f'{title_of(title)}</{tag}>\n{stage}\n{to_html(said)}{notes}</section>\n')
    return document(f'<main class="talk">\n{"".join(shown)}</main>', (*SCRIPTS, "slides"))


def board_and_sentence(body):
    """Split the text of a slide without picture: (board, the last paragraph or "").

    The last paragraph is a sentence below the board if the board has a formula or a table.
    """
    board, blank_line, sentence = body.rpartition("\n\n")
    if blank_line and ("$$" in body or "|" in body):
        return board, sentence
    return body, ""


def live(lecture, heading="h2"):
    """Return the live networks as HTML, with a picture for print and browsers without scripts.

    lecture: the address of the lecture's text. heading: the tag of the first heading.
    """
    picture = figure("live", "a scene with painted noise, S of RPC-Attention, and S of robust PCA")
    made = read("lecture/web/live.html").replace("<!-- stand-in -->", picture)
    if heading != "h2":
        made = re.sub(r"<h2>(.*?)</h2>", rf"<{heading}>\1</{heading}>", made, count=1)
    return made.replace("LECTURE", lecture)


def live_page():
    """Return the live networks alone, as HTML to embed."""
    return document(f"<main>\n{live('index.html', 'h1')}</main>", SCRIPTS)


def share_letters(body):
    """Move the shapes of letters in all pictures to the beginning of body, each shape once."""
    shape = r'<path id="DejaVu.*?/>'
    letters = "".join(dict.fromkeys(re.findall(shape, body, flags=re.S)))
    body = re.sub(shape, "", body, flags=re.S)
    return f'<svg class="letters" aria-hidden="true"><defs>{letters}</defs></svg>\n{body}'


def document(body, scripts):
    """Return a whole HTML file around body, with its styles, data and scripts."""
    light, dark = (HtmlFormatter(style=style).get_style_defs("pre")
                   for style in ("default", "github-dark"))
    code = "".join(read(f"lecture/web/{name}.js") for name in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="description" content="{DESCRIPTION}">
<meta property="og:title" content="{title_of(sections()[0])}">
<meta property="og:description" content="{DESCRIPTION}">
<meta property="og:image" content="IMAGE">
<link rel="icon" href="data:,">
<title>{title_of(sections()[0])}</title>
<style>
{read("lecture/web/page.css")}
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>
</head>
<body>
{share_letters(body)}
<script type="application/json" id="networks">{json.dumps(networks())}</script>
<script type="application/json" id="page-data">{json.dumps(page_data())}</script>
<script>
(() => {{
{code}}})();
</script>
</body>
</html>
"""


MAKERS = dict(index=page, slides=slides, live=live_page)


def main():
    p = common.new_parser(__doc__)
    kind = p.add_mutually_exclusive_group()
    kind.add_argument("--slides", action="store_const", dest="kind", const="slides",
                      help="make the slides")
    kind.add_argument("--live", action="store_const", dest="kind", const="live",
                      help="make the live part alone")
    kind.add_argument("--notebook", action="store_const", dest="kind", const="notebook",
                      help="make the notebook")
    p.add_argument("--out_dir", default="out/walkthrough", help="folder of the file (default: "
                   "%(default)s)")
    p.add_argument("--site", default="", help="address of the folder where the page is published")
    p.add_argument("--code", help="address of the code that the page links to (default: this "
                   "folder)")
    p.set_defaults(kind="index")
    args = p.parse_args()
    out = Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    if args.kind == "notebook":
        out /= "walkthrough.ipynb"
        write_notebook(out)
    else:
        out /= f"{args.kind}.html"
        code = args.code or os.path.relpath(ROOT, args.out_dir)
        image = f"{args.site.rstrip('/')}/live.png" if args.site else "live.png"
        made = MAKERS[args.kind]().replace('"CODE"', f'"{code}"').replace('"IMAGE"', f'"{image}"')
        out.write_text(made, encoding="utf-8")
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    common.run(main)
