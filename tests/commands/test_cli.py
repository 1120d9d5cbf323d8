"""The program ``hypermlp``, called like a user calls it."""

import json
import os
import subprocess
import sys

import pytest

from hypermlp import cli
from hypermlp.bench import idle
from hypermlp.cli import COMMANDS, implementation, main
from hypermlp.commands import info, shared
from hypermlp.errors import UserError
from hypermlp.reporting.records import read_record


def test_help_of_everything_fits_a_screen_and_shows_an_example(capsys):
    for words, shown in (
        ([], COMMANDS),
        (["--help"], COMMANDS),
        (["bench", "--help"], ["bench op", "bench lm"]),
    ):
        assert main(words) == 0
        overview = capsys.readouterr().out
        assert all(name in overview for name in shown)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hypermlp ")
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as stop:
            main([*name.split(), "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert text.count("\n") <= 40
        assert command.example in " ".join(text.split())


def test_an_unknown_command_fails(capsys):
    assert main(["nonsense"]) == 2
    assert "unknown command 'nonsense'\n" in capsys.readouterr().err
    assert main(["smaple", "tiny"]) == 2
    assert "unknown command 'smaple' (did you mean 'sample'?)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--tokns", "5"], ["--tokns=5"]])
def test_an_unknown_option_is_answered_with_the_nearest(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["sample", "tiny", "def", *words])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed == (
        f"hypermlp sample: unrecognized arguments: {' '.join(words)} (did you mean '--tokens'?); "
        "hypermlp sample --help lists the arguments\n"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("--json is wrong; name a file"), "--json is wrong; name a file"),
        (FileNotFoundError("no such file: x"), "no such file: x"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), "x.txt: No such file or directory"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(monkeypatch, capsys, error, line):
    def fail(args):
        raise error

    monkeypatch.setattr(info, "main", shared.command()(fail))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"hypermlp info: {line}\n"


@pytest.mark.parametrize("when", ["implementation", "_run"])
def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys, when):
    """Importing a command takes seconds, in which a user may change their mind."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, when, interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "hypermlp info: interrupted\n"


def test_a_name_that_is_not_text_can_be_printed(monkeypatch, capfd):
    monkeypatch.setattr(info, "main", shared.command()(lambda args: print("wrote \udcff")))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["info"]) == 0
    assert capfd.readouterr().out == "wrote \\udcff\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        *((command, "train") for command in ("train demo", "sample x", "plan demo", "demo", "flops demo")),
        ("serve x", "serve"),
        ("eval x", "eval"),
        ("report x", "report"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(command, extra):
    """After a plain `pip install .` there is nothing but torch, numpy and safetensors."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'tokenizers', 'datasets', 'accelerate', 'rich', 'yaml', 'filelock',"
        " 'tqdm', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        f"from hypermlp.cli import main; sys.exit(main({command.split()!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"pip install 'hypermlp[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_missing_module_is_a_bug(monkeypatch):
    def fail(args):
        import hypermlp.nonsense  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setattr(info, "main", shared.command()(fail))
    with pytest.raises(ModuleNotFoundError, match="hypermlp.nonsense"):
        main(["info"])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, AssertionError, TypeError])
def test_a_bug_keeps_its_traceback(monkeypatch, kind):
    def fail(args):
        raise kind("an internal error")

    monkeypatch.setattr(info, "main", shared.command()(fail))
    with pytest.raises(kind, match="an internal error"):
        main(["info"])


def test_a_group_of_commands_needs_one_of_its_commands(capsys):
    assert main(["bench"]) == 2
    assert "'bench' needs one of: op, table, lm" in capsys.readouterr().err
    assert main(["study", "raport"]) == 2
    assert "not 'raport' (did you mean 'report'?)" in capsys.readouterr().err


def test_every_command_has_the_same_shape():
    for name in COMMANDS:
        command = implementation(name)
        assert all(argument.settings["help"] for argument in command.arguments)
        assert callable(command.main)


def test_info_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "hypermlp", "info", "--json"], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["backends"]["reference"] == "available"
    assert facts["auto"] in facts["backends"]


def test_info_for_people(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "backends" in out
    assert "blocked" in out


@pytest.mark.thorough
def test_bench_op_writes_a_table_and_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(idle, "busy_processes", dict)
    path = tmp_path / "bench.json"
    small = "bench op --batch 1 --length 32 --hidden 32 --softmax-heads 2 --rounds 3 --backend blocked"
    recorded = [*small.split(), "--json", str(path)]
    assert main(recorded) == 0
    out = capsys.readouterr().out
    rows = read_record(path, "bench-op")["results"]
    assert [row["what"] for row in rows] == [
        "core forward",
        "core forward+backward",
        "layer forward",
        "layer forward+backward",
        "layer decode one token",
    ]
    for row in rows:
        assert row["what"] in out
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["ours_mib"] > 0
    monkeypatch.setattr(idle, "busy_processes", lambda: {"other (7)": 0.5})
    assert main(recorded) == 2
    assert "other (7): 50% of a core" in capsys.readouterr().err
    assert main(small.split()) == 0
    assert "warning: other processes use the machine (other (7): 50% of a core)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--softmax-heads", "5"], "5, which does not divide"),
        (["--label", "Q"], "label 'Q'"),
        (["--backend", "nope"], "unknown backend 'nope'"),
        (["--against", "HEAD"], "--against does not go with"),
        (["--goals"], "--goals does not go with"),
        (["--length", "9" * 30], "it must be at most 268,435,456"),
    ],
)
def test_bench_op_refuses_bad_arguments(capsys, arguments, message):
    small = ["--batch", "1", "--length", "8", "--hidden", "32", "--softmax-heads", "2", "--rounds", "3"]
    assert main(["bench", "op", *small, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve tiny --port 70000", "--port is 70000; it must be at most 65535"),
        ("plan demo --count 99999999999", "--count must be from 1 to 1,048,576"),
        ("sample tiny x --seed 4294967296", "--seed is 4294967296; it must be at least 0 and below"),
        ("extend tiny --context 268435456 --out nowhere", "this machine has"),
        ("extend tiny --context 1180591620717411303424 --out nowhere", "at most 268,435,456"),
    ],
)
def test_numbers_beyond_their_range_are_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
