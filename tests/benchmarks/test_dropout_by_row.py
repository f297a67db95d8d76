"""The benchmark of dropout by row."""

from benchmarks.dropout_by_row import main


def test_it_compares_three_ways(capsys):
    main(["--rows", "2", "--repetitions", "1"])
    title, columns, figures = capsys.readouterr().out.splitlines()
    assert title.startswith("139 tokens a row, rate 0.05")
    assert "by row" in columns
    rows, milliseconds, *ratios = figures.split()
    assert (int(rows), len(ratios)) == (2, 2)
    assert float(milliseconds) > 0
    assert all(float(ratio) > 0 for ratio in ratios)
