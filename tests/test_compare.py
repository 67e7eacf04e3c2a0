"""Runs as a table: what is a row, what its noise is, and what that allows to say."""
import json
import math

import compare
import pytest

def write_run(folder, val, code=1, **constants):
    """A finished run's folder; val None: an unfinished one's."""
    folder.mkdir()
    result = val and {"val": val, "bits_per_byte": 2 * val, "parameters": 7, "tokens": 4000,
                      "steps": constants.get("max_steps", 20)}
    constants = {"seed": int(folder.name[-1]), "log_dir": str(folder), "max_lr": 0.1} | constants
    (folder / "run.json").write_text(json.dumps({
        "constants": constants, "data": "a text", "starts": [{"code": code}], "result": result}))
    (folder / "log.txt").write_text("0 val 9.0\n10 val 3.0\n10 minutes 1\n20 val 2.5\n")

def test_a_row_is_what_differs_in_the_seed_alone_and_noise_is_pooled(tmp_path, capsys, monkeypatch):
    """Two seeds that lie close by chance would make any difference look large."""
    monkeypatch.chdir(tmp_path)
    for name, val, more in (
            ("a1", 2.0, {}), ("a2", 2.2, {}), ("a3", 2.1, {}), ("b1", 2.11, dict(code=2)),
            ("b2", 2.11, dict(code=2)), ("c1", 1.0, dict(max_lr=0.2)), ("d1", None, {}),
            ("e1", None, {}), ("f3", 2.1, {}), ("g1", 4.0, dict(minutes=5.0, max_steps=10)),
            ("g2", 4.0, dict(minutes=5.0, max_steps=12))):
        write_run(tmp_path / name, val, **more)
    (tmp_path / "e1" / "run.json").write_text('{"constants"')
    run = json.loads((tmp_path / "d1" / "run.json").read_text()) | {"result": {"failed": "NaN!"}}
    (tmp_path / "d1" / "run.json").write_text(json.dumps(run))
    monkeypatch.setattr("sys.argv", ["compare.py", "a?", "*"])
    compare.main()
    told_d, told_e, told_f, _, _, c, a, b, g, _, noise = capsys.readouterr().out.splitlines()
    assert told_f == "f3 is left out: a3 is the same run"  # it would be no other seed
    assert told_d == "d1 is left out: NaN!" and told_e.startswith("e1 is left out: it holds no run")
    # the squares of 0.1, 0, 0.1 and zeros by 2 + 1 + 1 degrees of freedom; t is 2.78 for four
    spread = math.sqrt(0.02 / 4)
    assert f"noise of a run is {spread:.4f}, pooled over the rows, with 4 degrees" in noise
    assert a == ("| 2.1000 | 4.2000 | 0.1000 | 3 | the baseline | 20 | 7 | a1: - |")
    allowed = 2.78 * spread * math.sqrt(1 / 2 + 1 / 3)
    assert b == (f"| 2.1100 | 4.2200 | 0.0000 | 2 | -0.0100 +- {allowed:.4f}: noise | 20 | 7 | b1: "
                 "code='00000002' |")
    allowed = 2.78 * spread * math.sqrt(1 + 1 / 3)
    assert c == (f"| 1.0000 | 2.0000 | - | 1 | +1.1000 +- {allowed:.4f}: ahead | 20 | 7 | c1: "
                 "max_lr=0.2 |")
    assert "| 2 |" in g and g.endswith("| 11 | 7 | g1: minutes=5.0 |")  # as many as fitted
    if compare.importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "compare.png").stat().st_size > 10_000
    write_run(tmp_path / "h1", 5.0, max_steps=0)  # only evaluated
    monkeypatch.setattr("sys.argv", ["compare.py", "c1", "b1", "h1"])
    compare.main()
    first, last, _, _, noise = capsys.readouterr().out.splitlines()[2:]
    assert "| -1.1100: ? |" in last and noise.startswith("No row has two seeds: nothing")
    monkeypatch.setattr("sys.argv", ["compare.py", "x*"])
    with pytest.raises(SystemExit, match=r"no finished run in x\*"):
        compare.main()
