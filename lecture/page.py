"""Weave lecture/WALKTHROUGH.md and the cells of lecture/walkthrough.py into a notebook, a page or a talk.

    python -m lecture.walkthrough --notebook     # lecture/walkthrough.ipynb, executed
    python -m lecture.walkthrough --page         # out/walkthrough/index.html: one file, nothing is fetched
    python -m lecture.walkthrough --slides       # out/walkthrough/slides.html: the page, a section a slide

The page and the talk show the pictures of lecture/pictures and the PAP explorer: S, the residual
and attention for eight values of lambda, six steps and three readings of the paper. Its numbers are
those of attention.py, computed here; lecture/web/explorer.js only looks them up.
"""

import base64
import html
import json
import re
import textwrap
import zlib
from importlib import import_module
from pathlib import Path

import torch

import common
from attention import FORMS, rpc_attention
from data.shapes import load_shapes
from robust.patches import corrupt_patches
from vit import classifier_from_checkpoint

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r"^!\[(.*?)\]\(pictures/(\w+)\.png\)\n", re.M)
LAMBDAS, STEPS, SCENES = (0.5, 1, 2, 3, 4, 6, 8, 16), 6, (35, 3)
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
FIRST_CELL = """\
# In the repository's folder: pip install -r requirements.txt matplotlib
# Elsewhere, in Colab, first clone the repository and go to its folder:
# !git clone <its address> rpc && pip install -q -r rpc/requirements.txt matplotlib
# %cd rpc"""


def extra(name, flag):
    """Import a package of requirements-dev.txt. ValueError, one line, where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise common.InputError(f"{flag} needs {name}: pip install -r requirements-dev.txt") from None


def sections():
    """The parts of lecture/WALKTHROUGH.md, each from its heading on."""
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
    head, *others = sections()
    yield "markdown", head
    yield "code", FIRST_CELL
    yield "code", code[""]
    yield "code", code["hero"]
    for text in others:
        before, *rest = re.split(PICTURE, text)
        yield "markdown", before
        for _, name, after in zip(*[iter(rest)] * 3):
            yield "code", code[name]
            yield "markdown", after


def write_notebook(path, execute=True):
    """Write the notebook, with the outputs of its cells."""
    nbformat = extra("nbformat", "--notebook")
    kinds = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [kinds[kind](text.strip(), id=f"cell-{i}")
             for i, (kind, text) in enumerate(notebook_cells())]
    kernel = dict(name="python3", display_name="Python 3", language="python")
    book = nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel))
    if execute:
        client = extra("nbclient", "--notebook")
        extra("ipykernel", "--notebook")
        client.NotebookClient(book, timeout=600, kernel_name="python3",
                              resources=dict(metadata=dict(path=str(ROOT)))).execute()
        for cell in cells:
            cell.get("metadata", {}).pop("execution", None)             # when each cell ran
    nbformat.write(book, path)


# --- the PAP explorer -----------------------------------------------------------------------------

@torch.no_grad()
def explorer_images():
    """[(name, image (3, 32, 32), keys, values)] of the four to choose from, in layer 1 of RPC."""
    model = classifier_from_checkpoint(common.load(ROOT / "weights/shapes_rpc.pt"))
    block, found = model.blocks[0], []
    images = load_shapes("test", max(SCENES) + 1).images / 255
    for scene in SCENES:
        for kind, n in (("clean", 0), ("six patches are noise", 6)):
            x, _ = corrupt_patches(images[scene:scene + 1], "noise", patch=4, n=n)
            _, k, v = block.attn.project(block.norm1(model.embed(x)))
            found.append((f"scene {scene}, {kind}", x[0], k, v))
    return found


def explorer_maps(k, v, form, lambd):
    """Of each step: bytes of |S| (64), of the residual (64), of attention (64 x 64); two numbers.

    |S| and |K - S - L| of a patch, over heads and channels: 255 is the longest key. Attention of a
    patch (row) to a patch, mean over heads: its square root, 255 is 1. The numbers: |K - S - L|
    over |K|, and the mean entropy of the attention rows in nats.
    """
    steps, longest = [], k.abs().sum((1, 3)).max()
    rpc_attention(k, v, n_iter=STEPS, lambd=lambd, **FORMS[form], trace=steps)
    for step in steps:
        left = k - step["S"] - step["L"]
        sizes = [x.abs().sum((1, 3))[0, 1:] / longest for x in (step["S"], left)]
        A = (step["K2"] @ step["K2"].mT / k.shape[-1] ** 0.5).softmax(-1)
        maps = torch.cat([*sizes, A.mean(1)[0, 1:, 1:].sqrt().flatten()])
        yield ((255 * maps).round().clamp(0, 255).byte(),
               ((left.norm() / k.norm()).item(), torch.special.entr(A).sum(-1).mean().item()))


def explorer_data():
    """What lecture/web/explorer.js looks up, as JSON: maps by image, reading, lambda and step."""
    packed, curves, names, pixels = [], [], [], []
    for name, image, k, v in explorer_images():
        names.append(name)
        pixels.append((255 * image).round().byte().permute(1, 2, 0).flatten())
        for form in FORMS:
            for lambd in LAMBDAS:
                maps, numbers = zip(*explorer_maps(k, v, form, lambd))
                packed += maps
                curves += [[round(x, 4) for x in pair] for pair in numbers]

    def packing(parts):
        return base64.b64encode(zlib.compress(bytes(torch.cat(parts).tolist()), 9)).decode()
    return json.dumps(dict(images=names, forms=list(FORMS), lambdas=LAMBDAS, steps=STEPS,
                           pixels=packing(pixels), maps=packing(packed), curves=curves))


# --- the page -------------------------------------------------------------------------------------

def with_formulas(text, keep):
    """Markdown whose formulas are replaced by marks; keep: a list that receives their MathML."""
    convert = extra("latex2mathml.converter", "--page").convert

    def mark(match):
        block, inline = match.groups()
        keep.append(convert(block or inline, display="block" if block else "inline"))
        return f"@@{len(keep) - 1}@@"
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.S)            # code has no formulas
    formula = r"\$\$(.+?)\$\$|\$([^$\n]+)\$"
    return "".join(part if part.startswith("`") else re.sub(formula, mark, part, flags=re.S)
                   for part in parts)


def coloured(code, language, _):
    """A block of code as HTML with classes of pygments."""
    pygments, lexers = extra("pygments", "--page"), extra("pygments.lexers", "--page")
    formatter = extra("pygments.formatters", "--page").HtmlFormatter(nowrap=True)
    return pygments.highlight(code, lexers.get_lexer_by_name(language or "text"), formatter)


def to_html(text):
    """A section of Markdown as HTML: formulas as MathML, pictures inline, files named."""
    markdown, kept = extra("markdown_it", "--page"), []
    parser = markdown.MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    body = parser.render(with_formulas(text, kept))
    body = re.sub(r"@@(\d+)@@", lambda match: kept[int(match[1])], body)

    def inline(match):
        data = base64.b64encode((ROOT / "lecture" / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'
    body = re.sub(r'src="([^"]+\.png)"', inline, body)
    body = re.sub(r'<a href="(?!http)([^"]*)">\1</a>', r"\1", body)
    body = re.sub(r'<a href="(?!http)([^"]*)">(.*?)</a>', r"\2 (<code>\1</code>)", body)
    body = body.replace("<table>", '<div class="wide"><table>')
    return body.replace("</table>", "</table></div>")


def page(slides=False):
    """The page as one HTML text; slides: with the script that shows one section at a time."""
    formatters = extra("pygments.formatters", "--page")
    light, dark = (formatters.HtmlFormatter(style=style).get_style_defs("pre")
                   for style in ("default", "github-dark"))
    css = (ROOT / "lecture/web/page.css").read_text()
    parts = []
    for i, text in enumerate(sections()):
        body = to_html(text)
        if 'alt="S, the residual and attention over four steps' in body:
            body += (ROOT / "lecture/web/explorer.html").read_text()
        parts.append(f'<section id="part-{i}">\n{body}</section>')
    titles = [html.escape(text.splitlines()[0].lstrip("# ")) for text in sections()]
    links = "".join(f'<li><a href="#part-{i}">{title}</a></li>' for i, title in enumerate(titles))
    scripts = [(ROOT / "lecture/web/explorer.js").read_text()]
    scripts += [(ROOT / "lecture/web/slides.js").read_text()] * slides
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{titles[0]}</title>
<style>
{css}
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>
</head>
<body>
<nav aria-label="sections"><ul>{links}</ul></nav>
<main>
{"".join(parts)}
</main>
<script type="application/json" id="explorer-data">{explorer_data()}</script>
<script>
{"".join(scripts)}
</script>
</body>
</html>
"""


def main(args):
    """What --notebook, --page and --slides ask for; ValueError, one line, without the extras."""
    out = Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    if args.notebook:
        write_notebook(ROOT / "lecture/walkthrough.ipynb")
        print("lecture/walkthrough.ipynb")
    for name, slides in (("index.html", False), ("slides.html", True)):
        if args.slides if slides else args.page:
            (out / name).write_text(page(slides))
            print(out / name)
