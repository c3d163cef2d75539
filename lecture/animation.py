"""Photograph the live page: live.gif, an animation, and live.png, one picture of it.

    python -m lecture.animation                               # into out/walkthrough
    python -m lecture.animation --out_dir lecture/pictures    # replace the pictures of README

Chromium (or Chrome) opens the live page in each state of FRAMES. Needs the packages of
lecture.page.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

import common
from lecture.page import live_page

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
FLAGS = ("--headless=new --no-sandbox --disable-gpu --disable-quic --disable-sync --no-first-run "
         "--hide-scrollbars --disable-background-networking --disable-component-update "
         "--virtual-time-budget=10000 --force-device-scale-factor=2").split()
WIDTH, HEIGHT, FRAME = 720, 480, 87         # in CSS pixels; the window has a frame, too
STYLE = """<style>
body { padding: 4px 12px; }
.live { margin: 0; }
h1 { margin: 8px 0; font-size: 26px; }
.live #plain, #guess { height: 108px; font-size: 18px; margin: 8px 0; }
#guess p { margin: 0 0 8px; font-size: 18px; }
.lead, #score, .controls, #plain .why, .small, .switches, .more, #expert, #attack,
.workbench > :last-child { display: none !important; }
</style></head>"""
SAME = "".join("4" if i in (1, 6, 10, 35, 46, 60) else "0" for i in range(64))
# (end of the page's link, milliseconds): the guess, its answer, another scene, the same noise
FRAMES = (("", 3000), ("&guess=smaller", 5000), ("&scene=8&guess=none", 3000),
          (f"&scene=5&paint={SAME}&guess=none", 5000))


def photograph(browser, page, folder):
    """Return a screenshot of the page in a browser."""
    shot = folder / "shot.png"
    command = [browser, *FLAGS, f"--window-size={WIDTH},{HEIGHT + FRAME}",
               f"--user-data-dir={folder / 'profile'}", f"--screenshot={shot}", page]
    subprocess.run(command, check=True, capture_output=True)
    return Image.open(shot).convert("RGB").crop((0, 0, 2 * WIDTH, 2 * HEIGHT))


def main():
    p = common.new_parser(__doc__)
    p.add_argument("--out_dir", default="out/walkthrough", help="folder of the pictures (default: "
                   "%(default)s)")
    out = Path(p.parse_args().out_dir)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise common.InputError(f"no browser found; install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "live.html")
        page.write_text(live_page().replace("</head>", STYLE), encoding="utf-8")
        frames = [photograph(browser, f"{page.as_uri()}#try{state}", Path(folder)).quantize(256)
                  for state, _ in FRAMES]
    out.mkdir(parents=True, exist_ok=True)
    frames[1].save(out / "live.png", optimize=True)
    frames[0].save(out / "live.gif", save_all=True, append_images=frames[1:], loop=0,
                   duration=[time for _, time in FRAMES])
    for name in ("live.gif", "live.png"):
        print(f"{out / name}: {(out / name).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    common.run(main)
