"""tests/mutants.py: its lists of bugs fit the tree as it is."""

import pytest

import mutants


@pytest.mark.parametrize("name", ["cls", "seg", "lm", "eval"])
def test_every_bug_of_a_list_stands_once_in_its_file(name):
    bugs = mutants.read_list(name)
    assert len(bugs) > 50 and all(bug["old"] != bug["new"] and bug["tests"] for bug in bugs)
