"""Commands on the pages of studies/ that read stored rows run as printed and print tables."""

import glob
import importlib
import re
import shlex

import pytest

from fixtures import ROOT

PAGES = "\n".join(path.read_text().replace("\\\n", " ")
                  for path in (ROOT / "docs/dispute.md", *sorted(ROOT.glob("studies/**/*.md"))))
SHOWN = dict.fromkeys(re.sub(r"\s+", " ", command).strip() for command in re.findall(
    r"python -m (studies[.\w]* ?[^`|#\n]*)", PAGES))
OF_ROWS = [command for command in SHOWN if "--rows studies" in command
           or command.startswith("studies.arms") and "--" not in command]


@pytest.mark.parametrize("command", OF_ROWS)
def test_page_command_prints_its_tables(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)                                 # new figures go here
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    study, *words = shlex.split(command)
    words = [path for word in words for path in (sorted(glob.glob(word)) or [word])]
    importlib.import_module(study).main(words)
    assert "|---" in capsys.readouterr().out


def test_every_named_study_exists():
    assert len(OF_ROWS) > 8
    for study in {command.split()[0] for command in SHOWN} - {"studies.reproduce"}:
        assert callable(importlib.import_module(study).main)
