"""Make a page, a talk or a notebook of lecture/WALKTHROUGH.md: one file each.

    python -m lecture.page                   # out/walkthrough/index.html: text and live networks
    python -m lecture.page --slides          # out/walkthrough/slides.html: a figure a slide
    python -m lecture.page --notebook        # out/walkthrough/walkthrough.ipynb, executed
    python -m lecture.page --base https://example.org/rpc/blob/main     # files become links

Page and talk need markdown-it-py, latex2mathml and pygments; the notebook nbformat, nbclient,
ipykernel and matplotlib. Nothing is fetched when they are read: the weights of three networks stand
in the file, and lecture/web/network.js runs them.
"""

import argparse
import base64
import html
import io
import json
import re
import textwrap
from importlib import import_module
from pathlib import Path

import torch
from PIL import Image

import common
from data.shapes import SHAPES, load_shapes
from vit import classifier_from_checkpoint

ROOT = Path(__file__).parents[1]
WEB = ROOT / "lecture/web"
NETWORKS = ("softmax", "symmetric", "rpc")
SCENES = (35, 3, 0, 1, 2, 5, 8, 9, 10, 15)              # test scenes of the live page
PICTURE = re.compile(r"^!\[(.*?)\]\(pictures/(\w+)\.png\)\n", re.M)
SCRIPTS = ("network", "damage", "attack", "inside", "draw", "live")     # of lecture/web
POLICY = ("default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
          "script-src 'unsafe-inline' 'unsafe-eval'")       # eval: a browser test waits for a name
FIRST_CELL = """\
# In the repository's folder: pip install -r requirements.txt matplotlib
# Elsewhere, in Colab, first clone the repository and go to its folder:
# !git clone <its address> rpc && pip install -q -r rpc/requirements.txt matplotlib
# %cd rpc"""


def extras(what, **packages):
    """Import modules, each given as module=package. InputError where one is not installed."""
    try:
        return [import_module(name.replace("__", ".")) for name in packages]
    except ImportError:
        names = " ".join(dict.fromkeys(packages.values()))
        raise common.InputError(f"{what} needs more packages: pip install {names}") from None


def sections():
    """[text] of the parts of lecture/WALKTHROUGH.md, each from its heading on."""
    return re.split(r"^(?=## )", (ROOT / "lecture/WALKTHROUGH.md").read_text(), flags=re.M)


# --- the notebook ---------------------------------------------------------------------------------

def code_cells():
    """{picture: code} of lecture/walkthrough.py; "": the first cell. Without `if wanted(...)`."""
    first, *others = (ROOT / "lecture/walkthrough.py").read_text().split("\n# %% ")[1:]
    cells = {"": "# " + first}
    for cell in others:
        title, name, body = re.match(r'(.*?)\nif wanted\("(\w+)"\):\n(.*)', cell, re.S).groups()
        cells[name] = f"# {title}\n{textwrap.dedent(body)}"
    return {name: code.strip() for name, code in cells.items()}


def notebook_cells():
    """("markdown" or "code", text) of every cell: prose, and what draws its picture where it is."""
    code = code_cells()
    for i, text in enumerate(sections()):
        before, *rest = re.split(PICTURE, text)
        yield "markdown", before
        if i == 0:
            yield "code", FIRST_CELL
            yield "code", code[""]
        for _, name, after in zip(*[iter(rest)] * 3):
            yield "code", code[name]
            yield "markdown", after


def smaller(picture):
    """A PNG in base64 with 256 colours."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as drawn:
        drawn.convert("RGB").quantize(256).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def write_notebook(path, execute=True):
    """Write the notebook, with the outputs of its cells."""
    nbformat, client, _ = extras("the notebook", nbformat="nbformat", nbclient="nbclient",
                                 ipykernel="ipykernel")
    kinds = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [kinds[kind](text.strip(), id=f"cell-{i}")
             for i, (kind, text) in enumerate(notebook_cells())]
    kernel = dict(name="python3", display_name="Python 3", language="python")
    book = nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel))
    if execute:
        client.NotebookClient(book, timeout=600, kernel_name="python3",
                              resources=dict(metadata=dict(path=str(ROOT)))).execute()
        for cell in cells:
            cell.get("metadata", {}).pop("execution", None)             # when each cell ran
            for drawn in (output.get("data", {}) for output in cell.get("outputs", ())):
                if "image/png" in drawn:
                    drawn["image/png"] = smaller(drawn["image/png"])
    nbformat.write(book, path)


# --- what the live page computes with -------------------------------------------------------------

def text_of(tensor):
    """A tensor's bytes in base64."""
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def networks():
    """{name: weights as 16-bit floats, and their names and sizes}, for network.js."""
    stored = {}
    for name in NETWORKS:
        model = classifier_from_checkpoint(common.load(ROOT / f"weights/shapes_{name}.pt"))
        weights = model.state_dict()
        stored[name] = dict(tensors=[(key, w.numel()) for key, w in weights.items()],
                            half=text_of(torch.cat([w.flatten() for w in weights.values()]).half()),
                            mean=model.config.mean, std=model.config.std)
    return stored


def page_data():
    """Test scenes as bytes (3, 32, 32), and their labels, for live.js."""
    split = load_shapes("test", max(SCENES) + 1)
    return dict(classes=list(SHAPES), labels=split.labels[list(SCENES)].tolist(),
                scenes=[text_of(split.images[scene]) for scene in SCENES])


# --- Markdown to HTML -----------------------------------------------------------------------------

def with_formulas(text, convert, keep):
    """Markdown whose formulas are replaced by marks; keep: a list that receives their MathML."""
    def mark(match):
        block, inline = match.groups()
        formula = convert(block or inline, display="block" if block else "inline")
        keep.append(f'<div class="wide">{formula}</div>' if block else formula)
        return f"@@{len(keep) - 1}@@"
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.S)            # code has no formulas
    formula = r"\$\$(.+?)\$\$|\$([^$\n]+)\$"
    return "".join(part if part.startswith("`") else re.sub(formula, mark, part, flags=re.S)
                   for part in parts)


def figure(name, alt):
    """A picture of lecture/pictures, inline: the SVG, its text in the page's colour, or the PNG."""
    drawn = ROOT / f"lecture/pictures/{name}.svg"
    if not drawn.exists():
        data = base64.b64encode(drawn.with_suffix(".png").read_bytes()).decode()
        return f'<img class="drawn" alt="{alt}" src="data:image/png;base64,{data}">'
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", "",
                 drawn.read_text(), flags=re.S)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)         # ids are the whole page's
    return svg.replace("<svg ", f'<svg class="drawn" role="img" aria-label="{alt}" ', 1)


def to_html(text, base=None):
    """Markdown as HTML: formulas as MathML, pictures inline, files as links below `base`."""
    markdown, mathml, pygments, lexers, formatters = extras(
        "the page", markdown_it="markdown-it-py", latex2mathml__converter="latex2mathml",
        pygments="pygments", pygments__lexers="pygments", pygments__formatters="pygments")

    def coloured(code, language, _):
        lexer = lexers.get_lexer_by_name(language or "text")
        return pygments.highlight(code, lexer, formatters.HtmlFormatter(nowrap=True))

    kept = []
    parser = markdown.MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    body = parser.render(with_formulas(text, mathml.convert, kept))
    body = re.sub(r"<p>@@(\d+)@@</p>|@@(\d+)@@",
                  lambda match: kept[int(match[1] or match[2])], body)
    body = re.sub(r'<img src="pictures/(\w+)\.png" alt="(.*?)" />',
                  lambda match: figure(match[1], match[2]), body)

    def file(match):                                    # a link to a file of the repository
        place = (ROOT / "lecture" / match[1]).resolve().relative_to(ROOT)
        return f'<a href="{base.rstrip("/")}/{place}">{match[2]}</a>' if base else match[2]
    body = re.sub(r'<a href="(?!http|#)([^"]*)">(.*?)</a>', file, body)
    body = body.replace("<table>", '<div class="wide"><table>')
    return body.replace("</table>", "</table></div>")


def title_of(text):
    """The heading of a section, as HTML."""
    return html.escape(text.splitlines()[0].lstrip("# "))


# --- the page and the talk ------------------------------------------------------------------------

def page(base=None):
    """The page as one HTML text: the sections, and after the first the live networks."""
    parts = [f'<section id="part-{i}">\n{to_html(text, base)}</section>\n'
             for i, text in enumerate(sections())]
    links = [(f"part-{i}", title_of(text)) for i, text in enumerate(sections())]
    links[1:1] = [("try", "Try it: the network in your browser"), ("attack", "Attack it")]
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in links)
    nav = f'<nav aria-label="sections"><ul>{items}</ul></nav>\n'
    return document(nav + "<main>\n" + parts[0] + live() + "".join(parts[1:]) + "</main>", SCRIPTS)


def slides(base=None):
    """The talk as one HTML text: title, figure, sentence a slide; printed, the section, too."""
    shown = []
    for text in (ROOT / "lecture/slides.md").read_text().split("\n## ")[1:]:
        before, alt, name, sentence = re.split(PICTURE, text)
        section = next((part for part in sections() if f"pictures/{name}.png" in part),
                       sections()[0])
        notes = to_html(PICTURE.sub("", section), base)
        shown.append(f'<section class="slide" id="slide-{len(shown) + 1}">\n<h2>{title_of(before)}'
                     f'</h2>\n<div class="stage">{figure(name, html.escape(alt))}</div>\n'
                     f'{to_html(sentence, base)}<aside class="notes">{notes}</aside></section>\n')
    shown[1:1] = [live()]
    return document(f'<main class="talk">\n{"".join(shown)}</main>', (*SCRIPTS, "slides"))


def live():
    """The live networks, and what stands in for them in print and without scripts."""
    picture = figure("live", "a damaged picture, the answer, and maps of each step")
    return (WEB / "live.html").read_text().replace("<!-- stand-in -->", picture)


def document(body, scripts):
    """A whole HTML file around body, with styles, data and scripts in it."""
    formatters, = extras("the page", pygments__formatters="pygments")
    light, dark = (formatters.HtmlFormatter(style=style).get_style_defs("pre")
                   for style in ("default", "github-dark"))
    code = "".join((WEB / f"{name}.js").read_text() for name in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{title_of(sections()[0])}</title>
<style>
{(WEB / "page.css").read_text()}
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>
</head>
<body>
{body}
<script type="application/json" id="networks">{json.dumps(networks())}</script>
<script type="application/json" id="page-data">{json.dumps(page_data())}</script>
<script>
(() => {{
{code}}})();
</script>
</body>
</html>
"""


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--slides", action="store_true", help="the talk in place of the page")
    p.add_argument("--notebook", action="store_true", help="the notebook in place of the page")
    p.add_argument("--out_dir", default="out/walkthrough")
    p.add_argument("--base", help="address of the repository's files, for links to them")
    args = p.parse_args()
    name = ("slides.html" if args.slides else "walkthrough.ipynb" if args.notebook
            else "index.html")
    out = Path(args.out_dir) / name
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.notebook:
        write_notebook(out)
    else:
        out.write_text(slides(args.base) if args.slides else page(args.base))
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    common.run(main)
